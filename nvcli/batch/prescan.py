"""A first pass over a regular file, without a model: how many records, which are bad, which twice.

What is found here costs seconds; found on the way it would cost the run.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvcli.batch.records import Failure, Kind, Record, find_doubts
from nvcli.batch.spelling import Teller
from nvcli.batch.walk import walk
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from nvcli.batch.existing import ExistingOutput
    from nvcli.batch.options import BatchOptions
    from nvcli.batch.spelling import Doubt
    from nvcli.batch.walk import Found

MAX_LISTED = 20
MAX_KEY_SETS = 1000  # of bodies, that are looked at


@dataclass(slots=True)
class Duplicate:
    id: str
    first_line: int
    line: int

    @property
    def message(self) -> str:
        """Of the record, whose line is told beside it."""
        return f"id {self.id[:80]!r} is that of line {self.first_line}"

    def __str__(self) -> str:
        return f"id {self.id[:80]!r} of line {self.line} is that of line {self.first_line}"


@dataclass(slots=True)
class Prescan:
    """What a pass found; lists hold the first few only."""

    num_records: int = 0  # in the input
    num_left: int = 0  # of those that are wanted, what an earlier run has not finished
    num_bad: int = 0
    bad: list[Failure] = field(default_factory=list)
    num_duplicates: int = 0
    duplicates: list[Duplicate] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def check(self, options: BatchOptions) -> None:
        """Raises `UsageError` for duplicates, and for bad lines under `--strict`."""
        if self.duplicates:
            more = f" ({self.num_duplicates} duplicates in all)" if self.num_duplicates > 1 else ""
            raise UsageError(
                f"{options.input}: {self.duplicates[0]}{more}",
                hint="Make ids unique, or use --on-duplicate suffix or keep.",
            )
        if self.bad and options.is_strict:
            first = self.bad[0]
            more = f" ({self.num_bad} bad records in all)" if self.num_bad > 1 else ""
            hint = "Without --strict a bad record becomes an error record."
            if first.code == "unknown_field":
                hint = "Without --strict this is a warning."
                if first.kind is not Kind.OPENAI:
                    hint = f"{hint} What --echo names is data."
            raise UsageError(
                f"{options.input}, line {first.line}: {first.message}{more}", hint=hint
            )


def can_prescan(path: str) -> bool:
    """Whether the input can be read twice: a regular file. What is none at all is also for the
    pre-scan, which says so before a model is loaded."""
    if path == "-":
        return False
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def prescan(options: BatchOptions, existing: ExistingOutput | None) -> Prescan:
    """Read the input once: JSON, kinds and ids; under `--strict` every field that needs no model.

    Raises what `read_rows` raises.
    """
    found = Prescan()
    teller = Teller(found.doubts.append)
    bodies = _Bodies()
    for item in walk(options, existing, is_exact=options.is_strict):
        row, identity, assigned = item.row, item.identity, item.assigned
        found.num_records += 1
        if assigned.first_line is not None:
            found.num_duplicates += 1
            if len(found.duplicates) < MAX_LISTED:
                duplicate = Duplicate(assigned.id, assigned.first_line, row.line)
                found.duplicates.append(duplicate)
        if not item.is_wanted:
            continue
        found.num_left += not item.is_finished
        if options.is_strict or identity.problem is not None:
            checked = item.parse()
            if isinstance(checked, Failure):
                found.num_bad += 1
                if len(found.bad) < MAX_LISTED:
                    found.bad.append(checked)
        elif identity.kind is Kind.OPENAI:
            teller.add(row.line, bodies.doubts(item))
        elif identity.kind is not None:
            teller.add(row.line, find_doubts(row, identity.kind, options))
    return found


class _Bodies:
    """Which fields of a body nobody reads takes a look at all of it: one for each set of keys."""

    def __init__(self) -> None:
        self._seen: set[int] = set()  # hashes: a key may be long

    def doubts(self, item: Found) -> tuple[Doubt, ...]:
        row = item.row
        body = row.value.get("body")
        if not isinstance(body, dict):
            return ()
        keys = hash(frozenset((*body, str(row.value.get("url")))))
        if keys in self._seen or len(self._seen) >= MAX_KEY_SETS:
            return ()
        self._seen.add(keys)
        checked = item.parse()
        return checked.doubts if isinstance(checked, Record) else ()
