"""Pieces joined equal the whole, however the input was cut; nothing half-finished is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.errors import RequestError
from nvcli.text import Tokenizer
from nvcli.text.detokenizer import IncrementalDetokenizer, StopMatcher


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.finish()]


@given(data=st.data(), skip=st.booleans())
def test_any_ids_joined_equal_the_full_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=30))
    pieces = pieces_of(tokenizer, ids, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_valid_text_never_shows_a_replacement(tokenizer: Tokenizer, text: str) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert sum(piece.count("\ufffd") for piece in pieces) == tokenizer.decode(
        tokenizer.encode(text)
    ).count("\ufffd")
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", ["👩🏽‍🚀", "世界", "é", "a😀b"])
def test_a_character_over_several_tokens_comes_whole(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text)
    pieces = pieces_of(any_tokenizer, ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_cut_character_is_one_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🚀")
    for cut in range(2, len(ids)):
        assert pieces_of(tokenizer, ids[:cut])[-1] == "\ufffd"
        assert "".join(pieces_of(tokenizer, ids[:cut])) == "a\ufffd"


def test_an_unknown_id_is_an_error_and_changes_nothing(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    first, *others = tokenizer.encode("世")
    assert detokenizer.feed(first) == ""
    for bad in (-1, 290, 2**31):
        with pytest.raises(RequestError):
            detokenizer.feed(bad)
    assert "".join(detokenizer.feed(i) for i in others) == "世"


# --- stop strings --------------------------------------------------------------------------------


def expected_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By trying every end: the first position where some stop string is complete."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    shown, stop = [], None
    for piece in pieces:
        result = matcher.feed(piece)
        shown.append(result.text)
        stop = stop or result.stop
    return [*shown, matcher.flush()], stop


SMALL = st.text("ab世", max_size=12)


@given(
    pieces=st.lists(SMALL, max_size=8),
    stops=st.lists(st.text("ab世", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_stop_strings_at_any_split(pieces: list[str], stops: list[str], include: bool) -> None:
    text, stop = expected_cut("".join(pieces), stops, include)
    shown, found = run(StopMatcher(stops, include=include), pieces)
    assert "".join(shown) == text
    assert found == stop


@given(text=SMALL, stops=st.lists(st.text("ab世", min_size=1, max_size=5), min_size=1, max_size=4))
def test_what_is_held_is_just_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        result = matcher.feed(character)
        if result.stop is not None:
            return
        shown += result.text
        longest = max(
            (n for stop in stops for n in range(len(stop) + 1) if text[:end].endswith(stop[:n])),
            default=0,
        )
        assert shown == text[: end - longest]


def test_every_split_point_of_a_long_stop() -> None:
    text, stop = "ABC DEFGHIJ KLM", "DEFGHIJ"
    for i in range(len(text)):
        for j in range(i, len(text)):
            shown, found = run(StopMatcher([stop]), [text[:i], text[i:j], text[j:]])
            assert ("".join(shown), found) == ("ABC ", stop)
            assert not any(character in "".join(shown) for character in stop[:1])


def test_a_prefix_that_does_not_become_a_stop_is_released() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.feed("xDEFG").text == "x"
    assert matcher.feed("!").text == "DEFG!"
    assert matcher.feed("DEF").text == ""
    assert matcher.flush() == "DEF"


def test_after_a_stop_there_is_nothing() -> None:
    matcher = StopMatcher(["b"], include=True)
    assert matcher.feed("abc").text == "ab"
    assert matcher.feed("more").text == ""
    assert matcher.flush() == ""


def test_cost_does_not_grow_with_the_number_of_stops() -> None:
    stops = ["a" * n + "b" for n in range(1, 400)]
    matcher = StopMatcher(stops)
    text = "a" * 20_000
    assert "".join(matcher.feed(c).text for c in text) + matcher.flush() == text
