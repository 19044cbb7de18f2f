"""What the verbs of `nvcli bench` share: checks, the loaded model, and showing what was stored."""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING

from nvcli.cli.console import print_text
from nvcli.errors import InterruptedRunError, NvcliError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from nvcli.bench.engine_run import Bench
    from nvcli.bench.record import Run
    from nvcli.bench.summary import Summary
    from nvcli.cli.bench_bundles import OutputOptions
    from nvcli.config import EngineConfig
    from nvcli.repl.screen import Screen


KEPT = "interrupted; what was measured is kept"
MOST = {"concurrency": 100_000, "repeat": 10_000, "max_num_seqs": 1_000_000}
NAME_COLUMNS = 10  # before the text of a line: what it is about
MOST_REQUESTS = 20_000_000  # an open loop's schedule is made before the start


def check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if not 0 < value < math.inf:
            raise UsageError(f"{flag} must be over 0", param=name)
        if value > (most := MOST.get(name, math.inf)):
            raise UsageError(f"{flag} must be at most {most:,}", param=name)


def check_warmup(warmup: str | float, duration: float | None) -> None:
    """Raises `UsageError` where nothing would be left to measure."""
    if duration is not None and warmup != "auto" and float(warmup) >= duration:
        raise UsageError(
            f"--warmup {float(warmup):g}s leaves nothing of {duration:g} s", param="warmup"
        )


def check_schedule(rate: float, seconds: float | None, requests: int | None) -> None:
    """Raises `UsageError` for an open loop of more requests than a schedule can hold."""
    number = requests if requests is not None else rate * (seconds or 0)
    if number > MOST_REQUESTS:
        raise UsageError(f"more than {MOST_REQUESTS:,} requests in one open loop", param="rate")


@contextlib.contextmanager
def stored_run() -> Iterator[Path]:
    """The file of a run that begins. Ctrl-C at its end, while a server stops or a report is made,
    finds the run stored, and says so. Raises what `mkdir` raises, and `NvcliError`, at once.
    """
    from nvcli.bench.record import new_path

    path = new_path()
    # Before minutes of loading for what would be refused after them.
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise NvcliError(f"cannot write {path}: nothing may be written in its folder")
    try:
        yield path
    except KeyboardInterrupt:
        if not path.exists():
            raise
        raise InterruptedRunError(
            KEPT, hint=f"'nvcli bench report {path.stem}' shows it."
        ) from None


@contextlib.contextmanager
def loaded(config: EngineConfig, screen: Screen) -> Iterator[Bench]:
    """The model in this process, closed at the end."""
    from nvcli.cli.console import Spinner, tell_startup

    with Spinner(screen, f"loading {config.model}"):
        from nvcli.bench.engine_run import Bench
        from nvcli.llm import LLM  # torch comes with it

        llm = LLM(config=config)
    tell_startup(screen, llm.startup)
    with llm:
        yield Bench.of(llm)


def finish(screen: Screen, path: Path, output: OutputOptions, *, was_interrupted: bool) -> int:
    """Show what was stored; Ctrl-C shows what there is, then ends as an interrupted run."""
    code = show(screen, path, output)
    screen.note(f"saved as {path.stem}; 'nvcli bench report {path.stem}'")
    if was_interrupted:
        raise InterruptedRunError(KEPT)
    return code


def show(screen: Screen, path: Path, output: OutputOptions) -> int:
    """Print a stored file's report, write what was asked for; the exit code."""
    from nvcli.bench import export, repeats
    from nvcli.bench.record import read_runs
    from nvcli.bench.summary import summarize

    output.check()
    runs: list[Run] = read_runs(path)
    summaries: list[Summary] = [summarize(run) for run in runs]
    if output.json:
        print_text(export.report_json(summaries))
    else:
        from nvcli.bench.card import card

        for index, summary in enumerate(summaries):
            print_lines(screen, [*([""] if index else []), *card(summary)])
        if over_runs := repeats.lines(summaries):
            print_lines(screen, over_runs)
    for target in output.out or ():
        export.write(target, path, runs, summaries)
    if any(s.unsound for s in summaries):
        return 6
    return 5 if any(s.missed for s in summaries) else 0


def print_lines(screen: Screen, lines: Sequence[str]) -> None:
    """Text on standard output: fitted to a terminal, in ASCII where its encoding holds no more."""
    from nvcli.bench.text import to_ascii
    from nvcli.repl.screen import visible

    if screen.out_is_terminal:
        width = screen.size()[0]
        lines = [part for line in lines for part in fitted(line, width)]
    text = visible("\n".join(lines))
    encoding = getattr(screen.out, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = to_ascii(text)
    screen.write(text + "\n")


def fitted(line: str, width: int) -> list[str]:
    """A line of a report in lines of at most `width` columns, where its parts allow: broken between
    them, then between words. Of a table that does not fit, every row is a line of its own."""
    from nvcli.bench.text import Wide
    from nvcli.repl.wrap import cells, wrap

    if isinstance(line, Wide):
        if line.needs <= width:
            return [line]
        narrow = line.narrow(width)
        if narrow is None:
            return []
        line = narrow
    indent = NAME_COLUMNS if width >= 6 * NAME_COLUMNS else 2
    if cells(line) <= width:
        return [line]
    if line.startswith(" " * NAME_COLUMNS):
        line = " " * indent + line.lstrip(" ")
    for separator in (" · ", " │ ", " "):
        line = wrap(line, width, indent, separator)
    return line.split("\n")
