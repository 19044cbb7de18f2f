"""Where a run writes: what is there already, and how it is made ready and left behind."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.batch import existing as existing_output
from nvcli.batch.fingerprint import RunMeta, meta_path
from nvcli.batch.options import Order, OutputFormat
from nvcli.batch.sink import LineSink, OutputError
from nvcli.errors import UsageError
from nvcli.paths import why_not_writable

if TYPE_CHECKING:
    from pathlib import Path

    from nvcli.batch.existing import ExistingOutput
    from nvcli.batch.options import BatchOptions


@dataclass(slots=True)
class Target:
    """Where a run writes, and what is there already."""

    options: BatchOptions
    existing: ExistingOutput | None = None
    meta: RunMeta | None = None

    @classmethod
    def check(cls, options: BatchOptions, description: dict[str, Any] | None) -> Target:
        """Look at the output, change nothing. Raises `UsageError` for one that must not be
        touched, `OutputError` for one that cannot be written."""
        target = cls(options)
        output = options.output
        check_stats_file(options)
        if output is None:
            return target
        if output.is_dir():
            raise UsageError(f"{output} is a folder", hint="Give a file: -o FILE.")
        if reason := why_not_writable(output):
            raise OutputError(f"cannot write {output}: {reason}")
        has_content = output.is_file() and output.stat().st_size > 0
        if options.continues:
            target.meta = target._resumed_meta(output, has_content, description or {})
        elif has_content and not (options.force or options.append):
            raise UsageError(
                f"{output} is there already",
                hint="--resume goes on with it, --force replaces it, --append writes behind it.",
            )
        return target

    def _resumed_meta(
        self, output: Path, has_content: bool, description: dict[str, Any]
    ) -> RunMeta | None:
        options = self.options
        if not has_content:
            return None
        try:
            meta = RunMeta.read(output)
        except UsageError:
            if not options.force_resume:
                raise
            meta = None
        if meta is None:
            if not options.force_resume:
                raise UsageError(
                    f"{meta_path(output)} is missing, so {output} cannot be resumed safely",
                    hint="--force-resume goes on all the same.",
                )
            return None
        if not options.force_resume:
            meta.check_resumes(description, options.seed)
        return meta

    def open(self, seed: int, description: dict[str, Any] | None) -> LineSink:
        """Make the output ready to be written on."""
        options, output = self.options, self.options.output
        if output is None:
            return LineSink.stdout()
        is_regular = output.is_file() or not output.exists()
        if is_regular:
            if options.force and output.exists():
                _truncate(output)
            elif output.exists() and output.stat().st_size > 0:
                existing_output.repair_tail(output, is_ours=not options.append)
            if self.existing is not None and self.existing.num_dropped:
                existing_output.drop_errors(output, options.takes)
            meta = RunMeta(seed, description or {})
            is_kept = options.append or options.output_format is OutputFormat.TEXT
            if not is_kept and meta != self.meta:
                meta.write(output)
        return LineSink.append_to(output)

    def scan(self) -> None:
        """Find the finished records of a resumed run."""
        options, output = self.options, self.options.output
        if options.continues and output is not None and output.is_file():
            self.existing = existing_output.scan(
                output,
                options.on_duplicate,
                drops_error_at=options.takes if options.retry_errors else lambda _: False,
            )

    def close(self) -> None:
        """Put a finished output into input order where a resumed run left it otherwise."""
        options, output = self.options, self.options.output
        if options.continues and output is not None and output.is_file():
            existing_output.repair_tail(output)
            if options.order is Order.INPUT:
                existing_output.sort_by_index(output)


def _truncate(path: Path) -> None:
    try:
        os.truncate(path, 0)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def check_stats_file(options: BatchOptions) -> None:
    """What a run writes last is looked at first. Raises `OutputError`."""
    path = options.stats_json
    if path is not None and (reason := why_not_writable(path)):
        raise OutputError(f"cannot write {path}: {reason}")
