"""One answer: what goes to the model, what comes out where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nvcli.errors import ContextLengthError
from nvcli.models.resolve import demo_folder
from nvcli.text import Tokenizer
from nvcli.types import FinishReason, Message, ToolCall
from tests.cli.conftest import Cli
from tests.fakes import FakeLLM, Reply


def sent(cli: Cli) -> str:
    """The last user message."""
    message = cli.llm.requests[-1].prompt[-1]
    assert isinstance(message, Message)
    assert isinstance(message.content, str)
    return message.content


# --- input ---------------------------------------------------------------------------------------


def test_p1_stdin_comes_first_and_the_argument_last(cli: Cli) -> None:
    result = cli("chat", "count lines", stdin=b"A\nB\n")
    assert sent(cli) == "A\nB\n\ncount lines"
    assert (result.code, result.out, result.err) == (0, "Paris.\n", "")
    assert len(cli.llm.requests) == 1
    assert cli.llm.is_closed


def test_stdin_may_come_after_or_stay_unread(cli: Cli) -> None:
    cli("chat", "count", "--stdin-position", "after", stdin=b"A\n")
    assert sent(cli) == "count\n\nA"
    cli("chat", "count", "--no-stdin", stdin=b"A\n")
    assert sent(cli) == "count"


def test_stdin_alone_is_the_prompt(cli: Cli) -> None:
    cli("chat", stdin="Grüße\r\n\n".encode())
    assert sent(cli) == "Grüße\r"


@pytest.mark.parametrize("flags", [[], ["--raw"], ["-s", "word " * 1500]])
def test_what_is_too_long_is_told_before_the_model_is_loaded(cli: Cli, flags: list[str]) -> None:
    result = cli("chat", *flags, stdin=b"word " * 3000)
    assert (result.code, result.out, cli.loads) == (1, "", [])
    assert re.match(
        r"nvcli: the prompt has [3-9],\d{3} tokens, the context holds 2,048", result.err
    )


def test_what_cannot_be_too_long_is_not_counted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "from_folder", None)
    assert cli("chat", stdin=b"word " * 300).code == 0


def test_p3_nothing_to_ask_ends_without_loading(cli: Cli) -> None:
    result = cli("chat", stdin=b"")
    assert (result.code, cli.loads) == (2, [])
    assert "there is no prompt" in result.err


def test_terminal_in_but_file_out_needs_a_prompt(cli: Cli) -> None:
    assert cli("chat", terminals=("in",)).code == 2
    assert cli("chat", "x", terminals=("in",)).code == 0


def test_files_are_fenced_with_their_name(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.md").write_text("```\ncode\n```\n")
    cli("chat", "-f", str(tmp_path / "a.py"), "-f", str(tmp_path / "b.md"), "explain")
    assert sent(cli) == "```a.py\nx = 1\n```\n\n````b.md\n```\ncode\n```\n````\n\nexplain"


def test_file_dash_is_stdin(cli: Cli) -> None:
    cli("chat", "-f", "-", "explain", stdin=b"text\n")
    assert sent(cli) == "```standard input\ntext\n```\n\nexplain"


def test_invalid_bytes_are_replaced_and_said(cli: Cli) -> None:
    result = cli("chat", "x", stdin=b"caf\xe9\n")
    assert sent(cli) == "caf�\n\nx"
    assert result.err == "nvcli: standard input is not UTF-8 from byte 3; bad bytes were replaced\n"
    result = cli("chat", "caf\udce9")
    assert sent(cli) == "caf�"
    assert result.err == "nvcli: the prompt is not UTF-8; bad bytes were replaced\n"


def test_byte_order_mark_and_line_separators(cli: Cli) -> None:
    cli("chat", stdin="\ufeffone\u2028two\x85three".encode())
    assert sent(cli) == "one\u2028two\x85three"


def test_system_prompt_from_text_and_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be brief.\n")
    for value in ("Be brief.", f"@{tmp_path / 'system.txt'}"):
        cli("chat", "-s", value, "x")
        assert cli.llm.requests[-1].prompt[0] == Message("system", "Be brief.")


def test_flags_reach_the_sampling_parameters(cli: Cli) -> None:
    flags = "-t 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --presence-penalty 1 -n 9 --seed 3"
    cli(
        "chat", *flags.split(), "--repetition-penalty", "1.1", "--stop", "a", "--stop", "b, c",
        "--think-budget", "4", "x",
    )  # fmt: skip
    params = cli.llm.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.repetition_penalty) == (1, 1.1)
    assert (params.max_tokens, params.seed, params.stop) == (9, 3, ("a", "b, c"))
    assert params.thinking_budget == 4


def test_flags_reach_the_engine(cli: Cli) -> None:
    flags = "--device cpu --dtype float32 --max-model-len 4k --max-num-seqs 2 -m here"
    cli("chat", *flags.split(), "--gpu-memory-utilization", "0.4", "--load-format", "dummy", "x",
        "--kv-cache-dtype", "fp8", "--enforce-eager", "--deterministic")  # fmt: skip
    config = cli.loads[-1]
    assert (config.model, config.device, config.dtype) == ("here", "cpu", "float32")
    assert (config.max_model_len, config.max_num_seqs) == (4096, 2)
    assert (config.memory_utilization, config.load_format) == (0.4, "dummy")
    assert (config.kv_cache_dtype, config.enforce_eager) == ("fp8", True)
    assert config.deterministic
    assert (config.attention_backend, config.block_size, config.run_ahead) == ("auto", 16, None)


@pytest.mark.parametrize(("flag", "is_on"), [("--run-ahead", True), ("--no-run-ahead", False)])
def test_how_steps_run_can_be_chosen(cli: Cli, flag: str, is_on: bool) -> None:
    result = cli("chat", "--attention-backend", "fa2", "--block-size", "256", flag, "x")
    assert result.code == 0
    config = cli.loads[-1]
    assert (config.attention_backend, config.block_size, config.run_ahead) == ("fa2", 256, is_on)


def test_an_attention_backend_that_is_none(cli: Cli) -> None:
    result = cli("chat", "--attention-backend", "fa4", "x")
    told = "nvcli: --attention-backend must be one of auto, torch, triton, fa2, fa3, got 'fa4'\n"
    assert (result.code, result.err, cli.loads) == (2, told, [])


def test_environment_gives_defaults_and_flags_win(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("from-env", "from-flag"):
        Path(name).symlink_to(demo_folder())
    monkeypatch.setenv("NVCLI_MODEL", "from-env")
    monkeypatch.setenv("NVCLI_CHAT_TEMPERATURE", "0.25")
    monkeypatch.setenv("NVCLI_CHAT_MAX_TOKENS", "5")
    cli("chat", "x", "-n", "6")
    assert cli.loads[-1].model == "from-env"
    assert cli.llm.requests[-1].params.temperature == 0.25
    assert cli.llm.requests[-1].params.max_tokens == 6
    cli("chat", "x", "-m", "from-flag")
    assert cli.loads[-1].model == "from-flag"


def test_raw_sends_the_text_as_it_is(cli: Cli) -> None:
    cli("chat", "--raw", "Once upon")
    request = cli.llm.requests[-1]
    assert (request.raw, request.prompt) == (True, "Once upon")


# --- output --------------------------------------------------------------------------------------

THINKER = Reply("4\n\n", reasoning="\nTwo and\ntwo.\n")


def test_p6_only_the_answer_is_on_stdout(cli: Cli) -> None:
    cli.llm = FakeLLM([THINKER])
    result = cli("chat", "--think", "2+2")
    assert (result.out, result.err) == ("4\n", "")


def test_thinking_and_statistics_go_to_a_terminal_stderr(cli: Cli) -> None:
    cli.llm = FakeLLM([THINKER])
    result = cli("chat", "2+2", "--color", "never", terminals=("err",))
    assert result.out == "4\n"
    thinking, thought, stats = result.err.rsplit("\n", 3)[:3]
    assert thinking == "Two and\ntwo."
    assert re.fullmatch(r"thought \d+\.\d s, 4 tok", thought)
    assert stats.startswith("6 tok · ")
    assert stats.endswith(" · stop")
    assert cli("-q", "chat", "2+2", terminals=("err",)).err == ""


@pytest.mark.parametrize(
    ("choice", "start"), [("full", "Two and\ntwo.\nthought "), ("fold", "thought "), ("hide", "")]
)
def test_show_thinking_without_a_terminal(cli: Cli, choice: str, start: str) -> None:
    cli.llm = FakeLLM([THINKER])
    result = cli("chat", "2+2", "--show-thinking", choice)
    assert result.err.startswith(start)
    assert (result.err == "") == (choice == "hide")
    assert result.out == "4\n"


def test_stats_flag_without_a_terminal(cli: Cli) -> None:
    result = cli("chat", "x", "--stats")
    assert result.err.startswith("1 tok · TTFT ")
    assert result.err.endswith("ctx 3/32k (0 %) · stop\n")


def test_no_think_is_passed_on(cli: Cli) -> None:
    cli.llm = FakeLLM([THINKER])
    assert cli("chat", "--no-think", "x", "--show-thinking", "full").err == ""
    assert not cli.llm.requests[-1].enable_thinking


def test_think_with_a_model_that_cannot_is_said(cli: Cli) -> None:
    cli.llm = FakeLLM(supports_thinking=False)
    assert "has no thinking mode" in cli("chat", "--think", "x").err
    assert cli("chat", "x").err == ""


def test_no_stream_prints_the_same(cli: Cli) -> None:
    cli.llm = FakeLLM([THINKER])
    assert cli("chat", "x", "--no-stream").out == "4\n"


def test_p14_json_is_one_object(cli: Cli) -> None:
    text = "Grüße \x1b[2J\u2028\x85"
    call = ToolCall(0, "c1", "look", '{"a":1}')
    cli.llm = FakeLLM([Reply(text, reasoning="Hm.", tool_calls=(call,))])
    result = cli("chat", "x", "--json", "--color", "always", terminals=("out", "err"))
    assert result.out.count("\n") == 1
    assert not any(c in result.out for c in "\x1b\u2028\x85")
    answer = json.loads(result.out)
    keys = ["model", "text", "thinking", "tool_calls", "finish_reason", "usage", "timings"]
    assert list(answer) == keys
    assert (answer["text"], answer["thinking"]) == (text, "Hm.")
    assert answer["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a":1}'}
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
    assert list(answer["timings"]) == [
        "queue_ms", "ttft_ms", "decode_ms", "total_ms", "tokens_per_s",
    ]  # fmt: skip


def test_fail_on_length(cli: Cli) -> None:
    cli.llm = FakeLLM([Reply("one two", finish_reason=FinishReason.LENGTH)])
    assert cli("chat", "x").code == 0
    result = cli("chat", "x", "--fail-on-length")
    assert (result.code, result.out) == (1, "one two\n")
    assert result.err == (
        "nvcli: the answer was cut after 2 tokens. Raise --max-tokens or --max-model-len.\n"
    )


def test_answer_cut_while_thinking_says_why_it_is_empty(cli: Cli) -> None:
    cli.llm = FakeLLM([Reply("", reasoning="Let me", finish_reason=FinishReason.LENGTH)])
    result = cli("chat", "x")
    assert (result.out, result.code) == ("", 0)
    assert "the answer is empty" in result.err


def test_prompt_too_long_is_1_and_partial_text_is_kept_on_errors(cli: Cli) -> None:
    cli.llm = FakeLLM([Reply("some text", error=ContextLengthError("the prompt is too long"))])
    result = cli("chat", "x")
    assert (result.code, result.out) == (1, "some text\n")
    assert result.err == "nvcli: the prompt is too long\n"
    assert cli("chat", "x", "--json").out == ""


def test_ctrl_c_keeps_the_partial_text(cli: Cli) -> None:
    def interrupt(number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    for flags in ((), ("--no-stream",)):
        cli.llm = FakeLLM([Reply("one two three four", before=interrupt)])
        result = cli("chat", "x", *flags)
        assert (result.code, result.out, result.err) == (130, "one two \n", "nvcli: interrupted\n")
        assert cli.llm.is_closed
    result = cli("chat", "x", "--json")
    assert json.loads(result.out)["finish_reason"] == "abort"


# --- escapes and colour --------------------------------------------------------------------------

HOSTILE = (
    "[/INST] list[int] [bold]x :smile: \x1b[2J\x1b]0;t\x07 \x1b]52;c;eA==\x07 a\rb\b\x9b0m\r\n!"
)
SHOWN = "[/INST] list[int] [bold]x :smile: ␛[2J␛]0;t␇ ␛]52;c;eA==␇ a␍b␈\\x9b0m\n!\n"


def test_r12_r13_nothing_of_the_model_is_interpreted(cli: Cli) -> None:
    cli.llm = FakeLLM([Reply(list(HOSTILE))])  # in pieces of one character
    assert cli("chat", "x").out == SHOWN
    assert cli("chat", "x", "--plain", terminals=("out",)).out == SHOWN
    shown = cli("chat", "x", "--color", "never", terminals=("out",)).out
    drawn = re.sub(r"\r(\x1b\[\d+A)?\x1b\[J", "\0", shown)  # our own redraw of the tail
    drawn = re.sub(r"\x1b\[\?7[lh]", "", drawn)  # within which no line wraps
    assert "\x1b" not in drawn
    assert drawn.split("\0")[-1].split() == SHOWN.split()
    assert json.loads(cli("chat", "x", "--json").out)["text"] == HOSTILE


@pytest.mark.parametrize(
    ("env", "terminals"),
    [
        ({}, ()),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, ()),
        ({"TERM": "dumb"}, ("out", "err")),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, ("out", "err")),
        ({"GITHUB_ACTIONS": "1"}, ()),
    ],
)
def test_p9_no_escapes_at_all(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], terminals: tuple[str, ...]
) -> None:
    cli.llm = FakeLLM([Reply("# Hi\n\n**bold** `code`\n", reasoning="Hm.")])
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for args in (["chat", "x", "--stats", "--show-thinking", "full"], ["--help"], ["nope"]):
        result = cli(*args, terminals=terminals)
        assert "\x1b" not in result.out + result.err


def test_p9_no_color_on_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    cli.llm = FakeLLM([Reply("# Hi\n\n**bold** `code`\n", reasoning="Hm.")])
    result = cli("chat", "x", terminals=("out", "err"))
    assert not re.search(r"\x1b\[[0-9;]*m", result.out + result.err)


def test_colour_on_a_terminal(cli: Cli) -> None:
    cli.llm = FakeLLM([Reply("**bold** move\n", reasoning="Hm.")])
    result = cli("chat", "x", terminals=("out", "err"))
    assert "\x1b[1mbold\x1b[0m move" in result.out
    assert "\x1b[2mHm.\x1b[0m" in result.err
    assert "\x1b[1m" in cli("chat", "x", "--color", "always").out


def test_piped_text_is_not_wrapped(cli: Cli) -> None:
    long = "word " * 60
    cli.llm = FakeLLM([Reply(long + "end")])
    assert cli("chat", "x").out == long + "end\n"
