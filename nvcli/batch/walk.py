"""The records of an input in order, each with its id and whether it is still to be answered: the
same for the pre-scan, a dry run and a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvcli.batch.identity import IdRegistry
from nvcli.batch.records import identify, parse_record
from nvcli.batch.rows import read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvcli.batch.existing import ExistingOutput
    from nvcli.batch.identity import Assigned
    from nvcli.batch.options import BatchOptions
    from nvcli.batch.records import Failure, Identity, Record
    from nvcli.batch.rows import Row


@dataclass(frozen=True, slots=True)
class Found:
    """A row, and what it is known by before it is looked at whole."""

    options: BatchOptions
    index: int  # in the whole input
    row: Row
    identity: Identity
    assigned: Assigned
    is_wanted: bool  # by --skip, --shard and --limit
    is_finished: bool  # the output has it already

    def parse(self) -> Record | Failure:
        """Looked at whole. A duplicate is told by `assigned`, not by this."""
        return parse_record(
            self.row,
            self.identity,
            self.options,
            record_id=self.assigned.id,
            index=self.index,
        )


def walk(
    options: BatchOptions, existing: ExistingOutput | None, *, is_exact: bool = True
) -> Iterator[Found]:
    """Up to the last record that is wanted. Raises what `read_rows` raises, whose `is_exact` is."""
    ids = IdRegistry(options.on_duplicate)
    rows = read_rows(options.input, options.input_format, options.prompt_field, is_exact=is_exact)
    for index, row in enumerate(rows):
        identity = identify(row, options.prompt_field)
        assigned = ids.assign(identity.given_id, row.identity, line=row.line, index=index)
        is_finished = existing is not None and assigned.key in existing.finished
        yield Found(options, index, row, identity, assigned, options.takes(index), is_finished)
        if options.ends_at(index):
            return
