"""A record in the engine, from its requests to its last output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvcli.batch.attached_outputs import HttpOutput
from nvcli.batch.records import failed

if TYPE_CHECKING:
    from nvcli.batch.feed import Prepared
    from nvcli.batch.records import Failure
    from nvcli.types import RequestOutput


@dataclass(slots=True)
class Running:
    """A record in the engine: the outputs of each of its requests as they come."""

    item: Prepared
    outputs: list[list[RequestOutput]] = field(default_factory=list)
    num_open: int = 0

    @property
    def num_sequences(self) -> int:
        return sum(request.params.num_sequences for request in self.item.requests)

    def failure(self, output: RequestOutput) -> Failure:
        """What a record ends as when one of its outputs is an error."""
        code = output.error_code or str(output.finish_reason)
        message = output.error or "the request was aborted"
        status = output.status if isinstance(output, HttpOutput) else 500
        return failed(self.item.record, code, message, status=status)
