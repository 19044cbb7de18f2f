"""Lines from bytes: any split, any packing, and what is no line end."""

from __future__ import annotations

import gzip
import itertools
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.batch.source import BOM, InputError, Line, LineSplitter, open_chunks, split_lines
from nvcli.errors import UsageError

PIECES = [
    b"a",
    b"\n",
    b"\r",
    b"\r\n",
    BOM,
    b"\xe2\x80\xa8",
    b"\xc2\x85",
    b"\x00",
    b"\xff",
    b'{"x":1}',
]


@st.composite
def cut_bytes(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    data = b"".join(draw(st.lists(st.sampled_from(PIECES), max_size=40)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=10)))
    edges = [0, *cuts, len(data)]
    return data, [data[a:b] for a, b in itertools.pairwise(edges)]


@given(cut_bytes())
def test_lines_do_not_depend_on_how_bytes_arrive(case: tuple[bytes, list[bytes]]) -> None:
    data, pieces = case
    parts = data.split(b"\n")
    if parts[-1] == b"":
        parts.pop()
    if parts:
        parts[0] = parts[0].removeprefix(BOM)
    expected = [Line(i, part.removesuffix(b"\r")) for i, part in enumerate(parts, start=1)]
    assert list(split_lines(pieces)) == expected


@given(cut_bytes(), st.integers(1, 12))
def test_long_lines_are_marked_and_others_kept(case: tuple[bytes, list[bytes]], limit: int) -> None:
    data, pieces = case
    splitter = LineSplitter(limit)
    lines = [line for piece in pieces for line in splitter.feed(piece)] + splitter.finish()
    for line, whole in zip(lines, split_lines([data]), strict=True):
        assert whole.data is not None
        assert line.data == (whole.data if len(whole.data) <= limit else None)


def read(path: Path) -> bytes:
    with open_chunks(str(path)) as chunks:
        return b"".join(chunks)


@pytest.mark.parametrize("data", [b"", b"one\ntwo", b"line\n" * 500_000])
def test_gzip_by_magic_in_members_and_with_padding(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "named.anything"
    half = len(data) // 2
    path.write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]) + b"\0" * 7)
    assert read(path) == data


def test_gzip_members_at_every_chunk_edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(b"a\n") + gzip.compress(b"b\n" * 3000) + gzip.compress(b"c"))
    for size in range(1, 40):
        monkeypatch.setattr("nvcli.batch.source.CHUNK_BYTES", size)
        monkeypatch.setattr("nvcli.batch.source.MAX_PIECE_BYTES", size * 3)
        assert read(path) == b"a\n" + b"b\n" * 3000 + b"c"


@pytest.mark.parametrize("cut", [3, 20, -1, -9])
def test_truncated_gzip_is_an_error_after_what_was_read(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(os.urandom(3000))[:cut])
    with pytest.raises(InputError, match="ends in the middle"):
        read(path)


def test_corrupt_gzip(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    data = bytearray(gzip.compress(b"hello hello hello" * 100))
    data[15] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(InputError, match="cannot read"):
        read(path)


def test_something_behind_a_gzip_member(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(b"x") + b"plain")
    with pytest.raises(InputError, match="something else follows"):
        read(path)


def test_zstd_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(10))
    for module in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match="zstandard"):
        read(path)


class TestZstd:
    @pytest.fixture
    def pack(self) -> Callable[[bytes], bytes]:
        zstandard = pytest.importorskip("zstandard")
        packed: Callable[[bytes], bytes] = zstandard.ZstdCompressor(write_checksum=True).compress
        return packed

    SKIPPABLE = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"

    def test_frames_at_every_chunk_edge(
        self, tmp_path: Path, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "named.anything"
        one, two = pack(b"one\n"), pack(b"two\n" * 3000)
        for parts in (one + two, self.SKIPPABLE + one + two + self.SKIPPABLE, one + two + bytes(5)):
            path.write_bytes(parts)
            for size in (*range(1, 20), 1 << 18):
                monkeypatch.setattr("nvcli.batch.source.CHUNK_BYTES", size)
                assert read(path) == b"one\n" + b"two\n" * 3000

    @pytest.mark.parametrize("cut", [4, 20, -1, -9])
    def test_truncated(self, tmp_path: Path, pack: Callable[[bytes], bytes], cut: int) -> None:
        path = tmp_path / "in.zst"
        path.write_bytes(pack(os.urandom(3000))[:cut])
        with pytest.raises(InputError, match="ends in the middle"):
            read(path)

    def test_damaged(self, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
        path = tmp_path / "in.zst"
        path.write_bytes(pack(b"one\n") + b"plain")
        with pytest.raises(InputError, match="something else follows"):
            read(path)
        data = bytearray(pack(os.urandom(3000)))
        data[1500] ^= 0xFF
        path.write_bytes(data)
        with pytest.raises(InputError, match="cannot read"):
            read(path)

    def test_a_bomb_comes_in_pieces(self, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
        path = tmp_path / "in.zst"
        path.write_bytes(pack(bytes(1 << 27)))
        with open_chunks(str(path)) as chunks:
            sizes = [len(chunk) for chunk in chunks]
        assert sum(sizes) == 1 << 27
        assert max(sizes) <= 1 << 25


def test_unreadable_inputs(tmp_path: Path) -> None:
    for path, reason in [(tmp_path / "none", "No such file"), (tmp_path, "it is a folder")]:
        with pytest.raises(UsageError, match=reason):
            read(path)
    if os.geteuid() != 0:
        secret = tmp_path / "secret"
        secret.touch(mode=stat.S_IWUSR)
        with pytest.raises(UsageError, match="Permission denied"):
            read(secret)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_utf16_is_named_and_not_read_as_prompts_with_zero_bytes(
    tmp_path: Path, encoding: str, *, is_packed: bool
) -> None:
    """What PowerShell's > and a spreadsheet's "Unicode text" write."""
    mark = "\ufeff" if encoding == "utf-16-be" else ""  # the others write one themselves
    data = f"{mark}prompt\nhello\n".encode(encoding)
    path = tmp_path / "in.csv"
    path.write_bytes(gzip.compress(data) if is_packed else data)
    with open_chunks(str(path)) as chunks, pytest.raises(UsageError, match="is UTF-16, not UTF-8"):
        list(chunks)


@pytest.mark.parametrize("data", [b"", b"a", b"\xff", b"\xff\xfd", b"\xef\xbb\xbfab"])
def test_what_begins_otherwise_arrives_as_it_is(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(data)
    with open_chunks(str(path)) as chunks:
        assert b"".join(chunks) == data
