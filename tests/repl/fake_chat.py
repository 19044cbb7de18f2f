"""The whole command with a scripted model, to be driven from outside: in a pipe or in tmux.

    python -m tests.repl.fake_chat SCRIPT chat ...

SCRIPT names one of the reply lists below; the model also writes each message it was sent, as JSON
lines, to the file named by $FAKE_CHAT_LOG, and a byte for each piece that was taken beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

from nvcli.cli import chat
from nvcli.cli.app import main
from nvcli.errors import ContextLengthError
from nvcli.types import FinishReason, ToolCall
from tests.fakes import FakeLLM, Reply
from tests.repl.driver import taken_path

NUMBERS = [f"{n} " for n in range(1, 2001)]
EMOJI = "- 👩🏽‍🚀 世界 " + "wide 漢字 text " * 12 + "\n- two\n\n```py\nx = '世'\n```\n"
SCRIPTS = {
    "plain": [Reply("The **answer** is 4.\n\nReally.\n", reasoning="Two and two.")],
    "slow": [Reply(NUMBERS, delay_s=0.02), Reply("Done.")],
    "slow-thinking": [Reply("x", reasoning=NUMBERS, delay_s=0.02), Reply("Done.")],
    "slow-prefill": [Reply("x", prefill_s=3600), Reply("Done.")],
    "hostile": [Reply("[/INST] list[int] [bold]x :smile: \x1b[2J\x1b]0;own\x07ed\r\b <b>end</b>")],
    "tools": [
        Reply(
            "",
            tool_calls=(ToolCall(0, "c", "add", '{"a": 2}'),),
            finish_reason=FinishReason.TOOL_CALLS,
        ),
        Reply("It is 3."),
    ],
    "two-calls": [
        Reply(
            "",
            tool_calls=(
                ToolCall(0, "c", "add", '{"a": 2}'),
                ToolCall(1, "d", "greet", '{"name": "Ann"}'),
            ),
            finish_reason=FinishReason.TOOL_CALLS,
        ),
        Reply("It is 3."),
    ],
    "hanging-tool": [
        Reply(
            "", tool_calls=(ToolCall(0, "c", "hang", "{}"),), finish_reason=FinishReason.TOOL_CALLS
        ),
        Reply("It hung."),
    ],
    "emoji-list": [Reply(EMOJI)],
    "emoji-slow": [Reply([EMOJI[i : i + 4] for i in range(0, len(EMOJI), 4)], delay_s=0.04)],
    "small-context": [
        Reply("word " * 50),
        Reply(error=ContextLengthError("the prompt does not fit")),
        Reply(error=ContextLengthError("the prompt does not fit")),
        Reply("fine"),
    ],
    "unicode": [Reply(["Space ", "👩🏽‍🚀", " world ", "世", "界"])],
}


LOG = Path(os.environ["FAKE_CHAT_LOG"]) if "FAKE_CHAT_LOG" in os.environ else None


class LoggingLLM(FakeLLM):
    """Tells a test outside what was asked."""

    def stream(self, prompt, params=None, **options):  # type: ignore[no-untyped-def]
        if LOG is not None:
            taken_path(LOG).write_bytes(b"")
            text = prompt if isinstance(prompt, str) else [dataclasses.asdict(m) for m in prompt]
            with LOG.open("a", encoding="utf-8") as file:
                file.write(json.dumps(text) + "\n")
        return super().stream(prompt, params, **options)

    def _run(self, request, reply):  # type: ignore[no-untyped-def]
        with contextlib.closing(super()._run(request, reply)) as deltas:
            for delta in deltas:
                yield delta
                if LOG is not None:
                    with taken_path(LOG).open("ab") as file:
                        file.write(b".")


if __name__ == "__main__":
    script = sys.argv.pop(1)
    length = 60 if script == "small-context" else 32768
    chat.open_model = lambda config, screen: LoggingLLM(SCRIPTS[script], max_model_len=length)
    sys.exit(main())
