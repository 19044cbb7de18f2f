"""The four trace formats, and how they are paced."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from nvcli.bench.traces import read_trace
from nvcli.errors import UsageError

MOONCAKE = """\
{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}
{"timestamp": 3000, "input_length": 520, "output_length": 5, "hash_ids": [7, 9]}
{"timestamp": 3000, "input_length": 10, "output_length": 5, "hash_ids": [11]}
"""
BAILIAN = (
    '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 2.5, "input_length": 20, '
    '"output_length": 4, "type": "text", "turn": 1, "hash_ids": [1, 2]}\n'
)
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0000000,110,27
"""
BURST = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,,1,ChatGPT,472,18,490,Conversation log
45,,1,ChatGPT,10,0,10,Conversation log
118,,1,GPT-4,90,230,320,API log
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        (MOONCAKE, "Mooncake", [(0, 600, 3), (3, 520, 5), (3, 10, 5)]),
        (BAILIAN, "Qwen-Bailian", [(0, 20, 4)]),
        (AZURE, "Azure", [(0, 4808, 10), (0.02004, 110, 27)]),
        (BURST, "BurstGPT", [(0, 472, 18), (113, 90, 230)]),
    ],
)
def test_formats(tmp_path: Path, text: str, kind: str, found: list[tuple[float, int, int]]) -> None:
    trace = read_trace(write(tmp_path, text))
    assert trace.kind == kind
    for entry, (at, n_in, n_out) in zip(trace.entries, found, strict=True):
        assert entry.at_s == pytest.approx(at, abs=1e-6)
        assert (entry.n_in, entry.n_out) == (n_in, n_out)


def test_blocks_share_what_they_shared(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    a, b, c = (p.prompt for p in trace.requests(vocab_size=5000, max_len=None, salt=1))
    assert (len(a), len(b), len(c)) == (600, 520, 10)
    assert a[:512] == b[:512]
    assert a[512:520] != b[512:520]
    salted = next(trace.requests(vocab_size=5000, max_len=None, salt=2)).prompt
    assert salted != a
    cut = next(trace.requests(vocab_size=5000, max_len=100, salt=1))
    assert (cut.n_in, cut.n_out) == (99, 1)


def test_speed_and_jitter(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    assert [e.at_s for e in trace.paced(speed=3, jitter=False, seed=0).entries] == [0, 1, 1]
    spread = [e.at_s for e in trace.paced(speed=1, jitter=True, seed=0).entries]
    assert all(a < b for a, b in itertools.pairwise(spread))
    assert spread == [e.at_s for e in trace.paced(speed=1, jitter=True, seed=0).entries]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "\x00", '{"a": NaN'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        read_trace(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MOONCAKE + '{"timestamp": 1, "input_length": 3}\n', "line 4: output_length is missing"),
        (MOONCAKE + '\n{"timestamp": 1, "inp\n', "line 5: invalid JSON"),
        (MOONCAKE + "[1]\n", "line 4: a field is missing or of another type"),
        (
            MOONCAKE + '{"timestamp": NaN, "input_length": 3, "output_length": 1}\n',
            "line 4: a time that is none",
        ),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": "x", "output_length": 1}\n',
            "line 4: invalid literal",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,20,4\nsoon,20,4\n",
            "line 3: Invalid isoformat",
        ),
        ("Timestamp,Request tokens,Response tokens\n1,20,4\n2,20\n", "line 3: a field is missing"),
        ("a,b\n1,2\n", "is no trace of Mooncake"),
        ("\udcff", "is no trace of Mooncake"),
    ],
)
def test_the_line_that_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=message):
        read_trace(path)
