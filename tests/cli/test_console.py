"""The colour decision, JSON that stays on its line, streams that went away."""

from __future__ import annotations

import io
import json
import re
import time

import pytest

from nvcli.cli.console import ColorMode, Spinner, dump_json, figures_json, wants_color
from nvcli.repl.screen import ControlFilter, Screen, repair, visible
from nvcli.types import RequestOutput, RequestTimes
from tests.waiting import until

AUTO, ALWAYS, NEVER = ColorMode.AUTO, ColorMode.ALWAYS, ColorMode.NEVER


@pytest.mark.parametrize(
    ("mode", "env", "terminal", "answer", "expected"),
    [
        (AUTO, {}, True, True, True),
        (AUTO, {}, False, True, False),
        (AUTO, {"NO_COLOR": "1"}, True, True, False),
        (AUTO, {"NO_COLOR": ""}, True, True, True),  # empty does not count (no-color.org)
        (AUTO, {"TERM": "dumb"}, True, False, False),
        (AUTO, {"FORCE_COLOR": "1"}, False, False, True),
        (AUTO, {"FORCE_COLOR": "1"}, False, True, False),  # an answer in a pipe stays plain
        (AUTO, {"FORCE_COLOR": "0"}, False, False, False),
        (AUTO, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False, False),
        (ALWAYS, {"NO_COLOR": "1", "TERM": "dumb"}, False, True, True),
        (NEVER, {"FORCE_COLOR": "1"}, True, True, False),
    ],
)
def test_colour_decision(
    mode: ColorMode, env: dict[str, str], terminal: bool, answer: bool, expected: bool
) -> None:
    assert wants_color(mode, env, to_terminal=terminal, is_answer=answer) is expected


def test_json_has_no_raw_control_or_line_separator() -> None:
    value = {"text": "é世\u2028\u2029\x85\x9b\x7f\x1b\ud800\n"}
    text = dump_json(value)
    assert "é世" in text
    assert not any(c in text for c in "\u2028\u2029\x85\x9b\x7f\x1b\ud800\n")
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="Out of range"):
        dump_json(float("nan"))


def test_timings_are_null_for_what_did_not_happen() -> None:
    assert set(figures_json(RequestOutput(request_id="a"))["timings"].values()) == {None}
    times = RequestTimes(1.0, 1.5, 2.0, 4.0).as_json(5)
    assert times == {
        "queue_ms": 500, "ttft_ms": 1000, "decode_ms": 2000, "total_ms": 3000, "tokens_per_s": 2,
    }  # fmt: skip
    assert RequestTimes(1.0, 1.0, 2.0, 2.0).as_json(1)["tokens_per_s"] is None


def test_controls_become_visible() -> None:
    assert visible("a\tb\nc\r\nd\re\x1b[2J\x07\x7f\x9b") == "a\tb\nc\nd␍e␛[2J␇␡\\x9b"


def test_filter_in_pieces_equals_filter_at_once() -> None:
    text = "a\r\nb\rc\r\r\n\x1b]0;t\x07\r"
    for cut in range(len(text) + 1):
        pieces = ControlFilter()
        assert pieces.feed(text[:cut]) + pieces.feed(text[cut:]) + pieces.flush() == visible(text)


def test_repair_of_surrogates() -> None:
    assert repair("caf\udce9") == "caf�"
    assert repair("\ud83d\ude00") == "😀"  # a pair that arrived in halves
    assert repair("x\ud800") == "x�"
    assert repair("日本") == "日本"
    assert repair("\udce6\udc97\udca5") == "日"  # bytes of one character, escaped one by one


def test_closed_standard_error_is_ignored() -> None:
    stream = io.StringIO()
    stream.close()
    screen = Screen(io.StringIO(), stream)
    screen.warn("nobody reads this")


def test_spinner_only_on_a_terminal() -> None:
    err = io.StringIO()
    with Spinner(Screen(io.StringIO(), err), "loading"):
        time.sleep(0.15)
    assert err.getvalue() == ""
    with Spinner(Screen(io.StringIO(), err, err_is_terminal=True), "loading \x1b"):
        until(lambda: re.search(r"loading ␛ \d+\.\d s", err.getvalue()))
    assert err.getvalue().endswith("\r\x1b[K")
