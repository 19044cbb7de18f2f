"""Which record is which, in 16 bytes a record.

A record is known by its `id` or `custom_id`; one without gets an id made of a hash of the record
and its occurrence number, so that equal lines stay apart and a resumed run finds each again.

`DigestTable` maps an 88-bit digest to a 40-bit number (a line, a count) in one flat buffer: a
Python set of a million keys would take ten times as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from nvcli.batch.options import OnDuplicate

DIGEST_BYTES = 11
_ENTRY_BYTES = 16
_EMPTY = bytes(DIGEST_BYTES)


def digest(kind: bytes, *parts: bytes) -> bytes:
    """88 bits of a hash; `kind` keeps different uses of the same parts apart."""
    state = blake2b(kind, digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(b"\0")
        state.update(part)
    return state.digest()


def text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class DigestTable:
    """Open addressing with linear probing; entries are only added or changed."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._table = bytearray(capacity * _ENTRY_BYTES)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    @property
    def num_bytes(self) -> int:
        return len(self._table)

    def get(self, key: bytes) -> int | None:
        offset, is_there = self._find(key)
        if not is_there:
            return None
        return int.from_bytes(self._table[offset + DIGEST_BYTES : offset + _ENTRY_BYTES], "little")

    def set(self, key: bytes, number: int = 0) -> None:
        offset, is_there = self._find(key)
        entry = key + number.to_bytes(_ENTRY_BYTES - DIGEST_BYTES, "little")
        self._table[offset : offset + _ENTRY_BYTES] = entry
        if not is_there:
            self._count += 1
            if self._count * 5 > self._capacity * 4:
                self._grow()

    def _find(self, key: bytes) -> tuple[int, bool]:
        assert len(key) == DIGEST_BYTES
        assert key != _EMPTY
        table = self._table
        slot = int.from_bytes(key[:8], "little") % self._capacity
        while True:
            offset = slot * _ENTRY_BYTES
            found = table[offset : offset + DIGEST_BYTES]
            if found == key:
                return offset, True
            if found == _EMPTY:
                return offset, False
            slot = slot + 1 if slot + 1 < self._capacity else 0

    def _grow(self) -> None:
        old = self._table
        self._capacity *= 2
        self._table = bytearray(self._capacity * _ENTRY_BYTES)
        for offset in range(0, len(old), _ENTRY_BYTES):
            key = bytes(old[offset : offset + DIGEST_BYTES])
            if key != _EMPTY:
                place, _ = self._find(key)
                self._table[place : place + _ENTRY_BYTES] = old[offset : offset + _ENTRY_BYTES]


@dataclass(frozen=True, slots=True)
class Assigned:
    """A record's id and the key a resumed run finds it by; `first_line` is set for a duplicate."""

    id: str
    key: bytes
    first_line: int | None = None


class IdRegistry:
    """Gives every record of the input its id, in the order they come."""

    def __init__(self, on_duplicate: OnDuplicate) -> None:
        self._on_duplicate = on_duplicate
        self._seen = DigestTable()

    def assign(self, given: str | None, identity: bytes, *, line: int, index: int) -> Assigned:
        if given is None:
            return self._generated(identity)
        key = key_of(given)
        if self._on_duplicate is OnDuplicate.KEEP:
            return Assigned(given, indexed_key_of(given, index))
        if self._on_duplicate is OnDuplicate.SUFFIX:
            return self._suffixed(given, key)
        first_line = self._seen.get(key)
        if first_line is not None:
            return Assigned(given, indexed_key_of(given, index), first_line)
        self._seen.set(key, line)
        return Assigned(given, key)

    def _generated(self, identity: bytes) -> Assigned:
        base = digest(b"record", identity)
        occurrence = self._seen.get(base) or 0
        self._seen.set(base, occurrence + 1)
        record_id = "rec-" + digest(b"occurrence", identity, b"%d" % occurrence).hex()
        return Assigned(record_id, key_of(record_id))

    def _suffixed(self, given: str, key: bytes) -> Assigned:
        count = self._seen.get(key)
        if count is None:
            self._seen.set(key, 1)
            return Assigned(given, key)
        while True:
            count += 1
            candidate = f"{given}#{count}"
            if key_of(candidate) not in self._seen:
                break
        self._seen.set(key, count)
        self._seen.set(key_of(candidate), 1)
        return Assigned(candidate, key_of(candidate))


def key_of(record_id: str) -> bytes:
    return digest(b"id", text_bytes(record_id))


def indexed_key_of(record_id: str, index: int) -> bytes:
    """The key where ids are not unique: of duplicates, and of all records under `keep`."""
    return digest(b"id at index", text_bytes(record_id), b"%d" % index)


def record_seed(run_seed: int, index: int, prompt: int = 0) -> int:
    """The seed of a record: a hash of the run's seed and its place in the input, so that order,
    window, shards and resumes change no text."""
    data = b"nvcli batch seed %d %d %d" % (run_seed, index, prompt)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1
