"""Slash commands that act on the turns: take back, ask again, edit, continue, branch."""

from __future__ import annotations

import base64
import contextlib
import math
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from nvcli.errors import UsageError
from nvcli.paths import expand_user
from nvcli.repl.files import fence, read_file
from nvcli.repl.numbers import spaced
from nvcli.repl.settings import parse_setting
from nvcli.repl.shell import choose, first_line, is_number, no_arguments, number
from nvcli.repl.store import SessionFile, new_name
from nvcli.repl.wrap import cells
from nvcli.text.words import counted
from nvcli.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nvcli.repl.model import TokenModel
    from nvcli.repl.session import Session
    from nvcli.repl.shell import Shell
    from nvcli.types import TokenLogprob

_CODE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)\n?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
_CLIPBOARDS = (
    ("WAYLAND_DISPLAY", ["wl-copy"]),
    ("DISPLAY", ["xclip", "-selection", "clipboard"]),
    ("DISPLAY", ["xsel", "-b"]),
    ("", ["pbcopy"]),
)
NUM_ALTERNATIVES = 5


def clear(shell: Shell, arguments: str) -> None:
    no_arguments(arguments, "clear")
    shell.session.clear()
    if shell.session.file is not None:
        shell.session.file = SessionFile(new_name())
    shell.attachments.clear()
    shell.has_warned = False
    shell.say("The conversation is empty.")


def undo(shell: Shell, arguments: str) -> None:
    count = number(arguments, "undo", "a number of turns")
    for turn in reversed(shell.session.undo(count)):
        shell.say(f"Took back: {first_line(turn.user)}")
    shell.save()


def retry(shell: Shell, arguments: str) -> None:
    overrides = {}
    for pair in arguments.split():
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"/retry takes settings like temperature=0.2, got {pair!r}")
        name, parsed = parse_setting(key, value)
        overrides[name] = parsed
    if not shell.session.turns:
        raise UsageError("there is nothing to retry")
    shell.pending.append(shell.session.retry(**overrides))


def edit(shell: Shell, arguments: str) -> None:
    count = number(arguments, "edit", "a number of turns to go back")
    turns = shell.session.turns
    if shell.edit is None:
        raise UsageError("there is no editor here")
    if not 1 <= count <= len(turns):
        have = counted(len(turns), "turn")
        raise UsageError(f"cannot go back {count}: the conversation has {have}")
    text = shell.edit(turns[-count].user).strip("\n")
    if not text.strip():
        raise UsageError("the message is empty; nothing was changed")
    shell.pending.append(shell.session.edit(text, count))


def go_on(shell: Shell, arguments: str) -> None:
    no_arguments(arguments, "continue")
    session = shell.session
    _, _, ids = session.answer_ids()
    turn = session.turns[-1]
    assert turn.output is not None, "it has an answer"
    is_cut = turn.is_interrupted or turn.output.finish_reason is FinishReason.LENGTH
    if not is_cut:
        raise UsageError("the last answer is complete", hint="/branch goes on from another token.")
    shell.pending.append(session.extend(ids))


def system(shell: Shell, arguments: str) -> None:
    if arguments == "none":
        shell.session.system = None
    elif arguments.startswith("@"):
        path = expand_user(arguments[1:])
        shell.session.system = read_file(path, shell.screen.warn).strip("\n") or None
    elif arguments:
        shell.session.system = arguments
    shell.quote(shell.session.system or "There is no system prompt.")


def attach_file(shell: Shell, arguments: str) -> None:
    paths = [m[0] or m[1] or m[2] for m in _PATH.findall(arguments)]
    if not paths:
        raise UsageError("/file takes paths", hint="Quote a path with spaces.")
    attach(shell, [expand_user(path) for path in paths])


_PATH = re.compile(r"\"([^\"]+)\"|'([^']+)'|(\S+)")


def attach(shell: Shell, paths: Sequence[Path]) -> None:
    """Read the files, all or none, and tell what they add to the next message."""
    blocks = [fence(path.name, read_file(path, shell.screen.warn)) for path in paths]
    for path, block in zip(paths, blocks, strict=True):
        count = spaced(shell.session.llm.count_tokens(block))
        size = spaced(len(block.encode("utf-8", "replace")))
        shell.screen.line_err(f"{path.name}: {size} bytes, {count} tokens", dim=True)
    shell.attachments += blocks


def code_blocks(text: str) -> list[str]:
    """The insides of the fenced blocks, in order."""
    return [match[2] for match in _CODE.finditer(text)]


def copy(shell: Shell, arguments: str) -> None:
    text = last_text(shell.session)
    word, _, which = arguments.partition(" ")
    if arguments:
        choose(word, ("code",), "copy")
        blocks = code_blocks(text)
        index = number(which.strip(), "copy code", "the number of a code block")
        if not 1 <= index <= len(blocks):
            raise UsageError(f"the answer has {counted(len(blocks), 'code block')}, not {index}")
        text = blocks[index - 1]
    how = to_clipboard(shell, text)
    shell.say(f"Copied {spaced(len(text))} characters, {how}.")


def to_clipboard(shell: Shell, text: str) -> str:
    """Through the desktop's program, or else the terminal (OSC 52), which works over SSH."""
    for variable, command in _CLIPBOARDS:
        if (not variable or os.environ.get(variable)) and shutil.which(command[0]):
            data = text.encode("utf-8", "replace")
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                if subprocess.run(command, input=data, timeout=5, check=False).returncode == 0:
                    return f"with {command[0]}"
    if not shell.screen.can_redraw_out:
        raise UsageError("there is no clipboard here")
    encoded = base64.b64encode(text.encode("utf-8", "replace")).decode()
    shell.screen.write(f"\x1b]52;c;{encoded}\x07")
    return "through the terminal"


def last_text(session: Session) -> str:
    turn = session.turns[-1] if session.turns else None
    if turn is None or turn.output is None:
        raise UsageError("there is no answer yet")
    return turn.output.text


def last(shell: Shell, arguments: str) -> None:
    """The last answer again, as text: to read raw Markdown, or after /clear of the screen."""
    no_arguments(arguments, "last")
    shell.quote(last_text(shell.session).strip("\n"))


# --- probabilities -------------------------------------------------------------------------------


def probs(shell: Shell, arguments: str) -> None:
    """Of every token of the answer, or the alternatives of one."""
    which = number(arguments, "probs", "the number of a token", default=0)
    model, prompt, ids = shell.session.answer_ids()
    scores = model.score([*prompt, *ids], NUM_ALTERNATIVES)[len(prompt) :]
    if which:
        _check_token(which, len(ids))
        shell.quote(_alternatives(model, scores[which - 1], ids[which - 1]))
        return
    _, _, is_text = model.split_answer(prompt, ids)
    lines = []
    for i, (token_id, score) in enumerate(zip(ids, scores, strict=True), start=1):
        if not is_text[i - 1] or score is None:
            continue
        others = [
            f"{_quoted(model, other)} {_percent(p)}" for other, p in score.top if other != token_id
        ]
        pad = 16 if not shell.width or shell.width >= 60 else 8
        row = f"{i:>4}  {_percent(score.logprob):>6}  {_quoted(model, token_id):<{pad}}"
        for other in others[:3]:  # those that fit beside
            longer = f"{row}  {other}"
            if shell.width and cells(longer) > shell.width:
                break
            row = longer
        lines.append(row.rstrip())
    shell.quote("\n".join(lines) or "The answer has no text.")
    shell.say("/probs N shows all alternatives of a token, /branch N [K] goes on from one.")


def _check_token(which: int, count: int) -> None:
    if not 1 <= which <= count:
        raise UsageError(f"the answer has tokens 1 to {count}, not {which}")


def _alternatives(model: TokenModel, score: TokenLogprob | None, chosen: int) -> str:
    if score is None:
        raise UsageError("this token has no alternatives")
    lines = []
    for k, (token_id, logprob) in enumerate(_others(score, chosen), start=1):
        lines.append(f"{k:>3}  {_percent(logprob):>6}  {_quoted(model, token_id)}")
    head = f"  *  {_percent(score.logprob):>6}  {_quoted(model, chosen)}  rank {score.rank}"
    return "\n".join([head, *lines])


def _others(score: TokenLogprob, chosen: int) -> list[tuple[int, float]]:
    return [(token_id, logprob) for token_id, logprob in score.top if token_id != chosen]


def branch(shell: Shell, arguments: str) -> None:
    """`/branch N [K]`: go on from token N as if its K-th alternative had been chosen."""
    words = arguments.split()
    if not 1 <= len(words) <= 2 or not all(map(is_number, words)):
        raise UsageError("/branch takes a token's number and which alternative", hint="See /probs.")
    which, k = int(words[0]), int(words[1]) if len(words) == 2 else 1
    session = shell.session
    model, prompt, ids = session.answer_ids()
    _check_token(which, len(ids))
    score = model.score([*prompt, *ids[:which]], NUM_ALTERNATIVES)[-1]
    others = _others(score, ids[which - 1]) if score is not None else []
    if not 1 <= k <= len(others):
        raise UsageError(f"token {which} has alternatives 1 to {len(others)}, not {k}")
    if model.is_end(others[k - 1][0]):
        raise UsageError("that alternative ends the answer", hint="Choose another one.")
    shell.pending.append(session.extend([*ids[: which - 1], others[k - 1][0]]))


def _quoted(model: TokenModel, token_id: int) -> str:
    return repr(model.token_text(token_id))


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(logprob):.1f} %"
