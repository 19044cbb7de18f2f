"""A batch job from the flags to the exit code: what is checked before a model is loaded, the run,
and what is left to do behind it.

    lock and look at OUT -> pre-scan the input -> load -> write OUT.meta.json -> run -> sort, report

Nothing is written before the input has passed its pre-scan and the model is there.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, is_dataclass, replace
from typing import TYPE_CHECKING

from nvcli.batch.attached import HttpEngine
from nvcli.batch.fingerprint import draw_seed, fingerprint
from nvcli.batch.options import OutputFormat
from nvcli.batch.output_lines import LineWriter
from nvcli.batch.prescan import can_prescan, prescan
from nvcli.batch.progress import Counts, ShowsProgress
from nvcli.batch.run import BatchRun
from nvcli.batch.signals import answer_status
from nvcli.batch.sink import OutputError, OutputLock
from nvcli.batch.source import InputError
from nvcli.batch.target import Target
from nvcli.errors import ClosedPipeError, NvcliError, TokenizerError
from nvcli.protocol import Fields
from nvcli.protocol.structured import grammar_spec, read_structure
from nvcli.protocol.tools import Tools

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nvcli.batch.engine import BatchEngine
    from nvcli.batch.fingerprint import RunMeta
    from nvcli.batch.options import BatchOptions
    from nvcli.batch.sink import LineSink
    from nvcli.config import EngineConfig
    from nvcli.text import Tokenizer

SOME_FAILED = 4  # exit code: the batch finished, some records failed


def run_job(
    options: BatchOptions,
    config: EngineConfig,
    *,
    find_model: Callable[[], Path | str],
    load: Callable[[], BatchEngine],
    progress: ShowsProgress,
    tells_safe: bool = True,
) -> int:
    """Run a batch and return its exit code, 0 or 4. Raises `NvcliError`s for every other end; the
    message says how many records are safe, and how to go on, unless that is not the caller's to do
    (`tells_safe`)."""
    telling = _telling_what_is_safe if tells_safe else _telling_nothing
    with ExitStack() as stack:
        stack.enter_context(answer_status(lambda: progress.note("starting: no record yet")))
        if options.output is not None and not _is_device(options.output):
            stack.enter_context(OutputLock(options.output))
        description = None
        if options.output is not None:
            description = fingerprint(options, config, find_model())
        target = Target.check(options, description)
        target.scan()
        counts = Counts()
        if target.existing is not None:
            counts.num_before = target.existing.num_records
        if can_prescan(options.input):
            with telling(options, counts, InputError):
                found = prescan(options, target.existing)
            found.check(options)
            for text in found.doubts:
                progress.warn(text)
            if not found.num_records:
                progress.warn(f"{options.input} holds no record")
            counts.total = found.num_left
            if not found.num_left and target.existing is not None and target.existing.num_records:
                target.close()
                _write_stats(options, None, counts)
                return _finish(options, counts, target, progress)
        seed = _seed(options, target.meta)
        engine = load()
        stack.callback(engine.close)
        _check_response_format(options, engine)
        with telling(options, counts):
            sink = target.open(seed, description)
            _run(options, engine, sink, target, counts, progress, seed)
            target.close()
        _write_stats(options, engine, counts)
        return _finish(options, counts, target, progress)


def _run(
    options: BatchOptions,
    engine: BatchEngine,
    sink: LineSink,
    target: Target,
    counts: Counts,
    progress: ShowsProgress,
    seed: int,
) -> None:
    tokenizer = tokenizer_of(engine)
    counts.started = time.monotonic()
    run = BatchRun(
        options,
        engine,
        tokenizer=tokenizer,
        sink=sink,
        lines=LineWriter(
            options.output_format,
            engine.model_name,
            options.include_thinking,
            tokenizer,
            is_attached=isinstance(engine, HttpEngine),
        ),
        counts=counts,
        progress=progress,
        seed=seed,
        existing=target.existing,
    )
    try:
        try:
            run.execute()
        finally:
            sink.close()
    except NvcliError as error:
        if not isinstance(error, ClosedPipeError):  # which is nobody's business
            progress.finish(counts, is_whole=False)
        with suppress(OutputError):  # the first error is the one to tell
            _write_stats(options, engine, counts)
        raise


@contextmanager
def _telling_what_is_safe(
    options: BatchOptions, counts: Counts, kind: type[NvcliError] = NvcliError
) -> Iterator[None]:
    try:
        yield
    except ClosedPipeError:
        raise
    except kind as error:
        _say_what_is_safe(error, options, counts)
        raise


def _telling_nothing(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


def _say_what_is_safe(error: NvcliError, options: BatchOptions, counts: Counts) -> None:
    safe = counts.num_before + counts.num_written
    noun = "record is" if safe == 1 else "records are"
    place = str(options.output) if options.output is not None else "standard output"
    error.message = f"{error.message}; {safe:,} {noun} safe in {place}"
    error.args = (error.message,)
    if options.output is None or _is_device(options.output):
        return
    if options.output_format is OutputFormat.TEXT or options.append:
        return
    flag = "--resume in place of --force" if options.force else "--resume"
    run = "Mend the input, then run" if isinstance(error, InputError) else "Run"
    error.hint = f"{run} it again with {flag} to go on."


def _check_response_format(options: BatchOptions, engine: BatchEngine) -> None:
    """Raises `UsageError` for a schema of the run's that cannot be enforced; one of a record's own
    costs that record only."""
    if options.response_format is None:
        return
    if isinstance(engine, HttpEngine):
        engine.check_response_format(options.response_format)
        return
    structure = read_structure(Fields({"response_format": options.response_format}))
    spec = grammar_spec(structure, Tools(), tokenizer_of(engine))
    if spec is not None:
        engine.compile_grammar(replace(spec, param="--schema"))


def tokenizer_of(engine: BatchEngine) -> Tokenizer | None:
    try:
        return engine.tokenizer
    except TokenizerError:
        return None


def _seed(options: BatchOptions, meta: RunMeta | None) -> int:
    if options.seed is not None:
        return options.seed
    return meta.seed if meta is not None else draw_seed()


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _finish(options: BatchOptions, counts: Counts, target: Target, progress: ShowsProgress) -> int:
    progress.finish(counts)
    failed = counts.num_failed + (target.existing.num_errors if target.existing else 0)
    if not failed:
        return 0
    done = counts.num_before + counts.num_written
    text = f"nvcli: {failed:,} of {done:,} records failed"
    if counts.failure is not None:
        line, code, message = counts.failure
        first = ", the first" if counts.num_failed > 1 else ""
        shown = "".join(c if c.isprintable() else " " for c in message[:200])  # it may quote data
        text += f"{first} at line {line}: {shown}"
        if code == "invalid_json" and counts.num_failed == done:
            text += "; --input-format text takes a line for a prompt"
    if options.output is not None and options.output_format is not OutputFormat.TEXT:
        text += "; --retry-errors runs them again"
    progress.note(text)
    return SOME_FAILED


def _write_stats(options: BatchOptions, engine: BatchEngine | None, counts: Counts) -> None:
    """`engine` is None where all was done before and no model was loaded."""
    if options.stats_json is None:
        return
    stats = None if engine is None else engine.stats()
    elapsed = counts.elapsed_s
    value = {
        "command": "batch",
        "model": None if engine is None else engine.model_name,
        "usage": {
            "prompt_tokens": counts.prompt_tokens,
            "completion_tokens": counts.completion_tokens,
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        },
        "timings": {
            "total_ms": round(elapsed * 1000, 3),
            "tokens_per_s": round(counts.completion_tokens / max(elapsed, 1e-9), 2),
            "records_per_s": round(counts.num_written / max(elapsed, 1e-9), 3),
        },
        "records": {
            "written": counts.num_written,
            "failed": counts.num_failed,
            "resumed": counts.num_before,
        },
        "engine": asdict(stats) if is_dataclass(stats) and not isinstance(stats, type) else None,
    }
    try:
        options.stats_json.write_text(json.dumps(value, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {options.stats_json}: {error.strerror}") from error
