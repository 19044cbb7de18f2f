"""What a batch run is asked to do: the flags of `nvcli batch`, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from nvcli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


class InputFormat(StrEnum):
    AUTO = "auto"
    JSONL = "jsonl"
    TEXT = "text"
    CSV = "csv"
    PARQUET = "parquet"


class OutputFormat(StrEnum):
    AUTO = "auto"  # OpenAI's envelope for OpenAI's lines, simple for all others
    OPENAI = "openai"
    SIMPLE = "simple"
    TEXT = "text"


class Order(StrEnum):
    INPUT = "input"
    COMPLETION = "completion"


class OnDuplicate(StrEnum):
    ERROR = "error"
    SUFFIX = "suffix"
    KEEP = "keep"


class ProgressMode(StrEnum):
    AUTO = "auto"
    BAR = "bar"
    PLAIN = "plain"
    JSON = "json"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Shard:
    """Every count-th record; `number` runs from 1."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_shard(text: str) -> Shard:
    """`2/8`: the second of eight. Raises `UsageError`."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"{text!r} is no shard", hint="Write i/n, from 1/n to n/n.", param="shard")
    return Shard(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Raises `UsageError` when two options contradict each other."""

    input: str  # a path, or - for standard input
    output: Path | None = None  # None: standard output
    input_format: InputFormat = InputFormat.AUTO
    prompt_field: str | None = None
    output_format: OutputFormat = OutputFormat.AUTO
    resume: bool = False
    retry_errors: bool = False
    force: bool = False
    append: bool = False
    force_resume: bool = False
    order: Order = Order.INPUT
    window: int | None = None  # None: 4 x the engine's sequences
    on_duplicate: OnDuplicate = OnDuplicate.ERROR
    is_strict: bool = False
    max_errors: int | None = None
    limit: int | None = None
    skip: int = 0
    shard: Shard = field(default_factory=Shard)
    stats_json: Path | None = None
    include_thinking: bool = False
    echo: tuple[str, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    response_format: dict[str, Any] | None = None  # of records that ask for no shape themselves
    think: bool | None = None
    system: str | None = None
    is_raw: bool = False
    seed: int | None = None  # of the run; a record's is a hash of it and the record's index

    def __post_init__(self) -> None:
        if self.output is None:
            for name in ("resume", "retry_errors", "append", "force", "force_resume"):
                if getattr(self, name):
                    flag = "--" + name.replace("_", "-")
                    raise UsageError(f"{flag} needs a file to work on", hint="Give -o FILE.")
        modes = [n for n in ("continues", "append", "force") if getattr(self, n)]
        if len(modes) > 1:
            raise UsageError(
                "--resume (or --retry-errors), --append and --force exclude each other",
                hint="Give one of them.",
            )
        if self.output_format is OutputFormat.TEXT and (self.continues or self.echo):
            flag = "--echo" if self.echo else "--resume"
            raise UsageError(
                f"{flag} needs records with ids, --output-format text has none",
                hint="Use --output-format simple.",
            )
        if self.is_stdin and self.input_format is InputFormat.PARQUET:
            raise UsageError("Parquet cannot be read from a pipe", hint="Give a file.")
        for name, low in (("window", 1), ("max_errors", 0), ("limit", 1), ("skip", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} must be at least {low}, got {value}", param=name)
        if self.is_raw and (self.system is not None or self.think is not None):
            raise UsageError(
                "--raw sends the text as it is", hint="Leave out --system and --think."
            )

    @property
    def continues(self) -> bool:
        """Whether what stands in the output already is kept and not run again."""
        return self.resume or self.retry_errors or self.force_resume

    @property
    def is_stdin(self) -> bool:
        return self.input == "-"

    # --- which records of the input: skip, then shard, then limit --------------------------------

    def takes(self, index: int) -> bool:
        """Whether the record is in. Indices are those of the whole input."""
        place, rest = self._place(index)
        return place >= 0 and rest == 0 and (self.limit is None or place < self.limit)

    def ends_at(self, index: int) -> bool:
        """Whether none behind this record is in."""
        return self.limit is not None and self._place(index)[0] >= self.limit - 1

    def _place(self, index: int) -> tuple[int, int]:
        """Which of the shard's records that are not skipped, and how far behind it."""
        first = self.skip + (self.shard.number - 1 - self.skip) % self.shard.count
        return divmod(index - first, self.shard.count)
