"""What `nvcli bench serve` and `sweep` share: the server under load, and running the points."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from nvcli.config import DEFAULT_MODEL
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from nvcli.bench.calibrate import Calibration
    from nvcli.bench.online import Options, Point
    from nvcli.bench.summary import Summary
    from nvcli.bench.target import Target
    from nvcli.bench.workload import Workload
    from nvcli.cli.bench_bundles import ClientOptions
    from nvcli.cli.engine_options import EngineOptions
    from nvcli.repl.screen import Screen


def client_options(client: ClientOptions, workload: Workload, engine: EngineOptions) -> Options:
    from nvcli.bench.online import Options

    return Options(
        workload,
        client.timeout,
        client.warmup,
        client.slo or {},
        client.gpu_metrics,
        engine.tensor_parallel_size or 1,
    )


@contextlib.contextmanager
def target_of(
    url: str | None, name: str | None, engine: EngineOptions, screen: Screen
) -> Iterator[Target]:
    """The endpoint that was named, or nvcli's own server while the block runs."""
    from nvcli.bench.target import (
        ANY_VOCABULARY,
        Target,
        flag_of,
        own_target,
        own_vocabulary,
        server_flags,
    )

    fields = engine.given()
    if url is not None:
        others = [flag_of(k, v) for k, v in fields.items() if k != "model"]
        if others:
            raise UsageError(f"{', '.join(others)}: the server behind URL has its own engine")
        model = engine.model
        vocab_size, max_len = own_vocabulary(model) if model else (ANY_VOCABULARY, None)
        url = url if url.startswith("unix:") else _clean_url(url)
        key = os.environ.get("NVCLI_API_KEY")
        yield Target(url, key, name, vocab_size, max_len)
        return
    if name is not None:
        raise UsageError("--served-model-name is for a URL", param="served_model_name")
    from nvcli.bench.children import own_server

    screen.note("starting nvcli serve")
    with own_server(server_flags(fields)) as own:
        target = own_target(own, engine.model or DEFAULT_MODEL, fields)
        if target.calibration is None:
            screen.note("no prediction: nothing is calibrated here; `nvcli bench latency` does it")
        yield target


def _clean_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no URL", hint="Write http://127.0.0.1:8000.", param="url")
    return url.rstrip("/").removesuffix("/v1")


def most_at_once(found: Calibration | None, workload: Workload) -> int | None:
    """L_max of nvcli's own server, where a ladder ends; None where nothing is known of it."""
    from nvcli.bench.limits import binding, limit_rows

    if found is None:
        return None
    if not found.num_blocks:
        return found.slots
    rows = limit_rows(
        num_blocks=found.num_blocks,
        block_size=found.block_size,
        slots=found.slots,
        n_in=workload.in_len.mean,
        n_out=workload.out_len.mean,
    )
    return max(int(binding(rows)["allows"]), 1)


def measure(
    target: Target,
    chosen: Options,
    points: Sequence[Point],
    command: str,
    path: Path,
    screen: Screen,
    *,
    stops_early: bool = False,
) -> bool:
    """Run the points into one file, up to one in which the server was gone; whether Ctrl-C ended
    it.
    """
    from nvcli.bench.audit import server_was_gone
    from nvcli.bench.ceiling import client_ceiling
    from nvcli.bench.load_run import run_cancellable
    from nvcli.bench.online import Session
    from nvcli.bench.record import read_runs
    from nvcli.bench.summary import summarize
    from nvcli.bench.sweep import is_saturated

    screen.note("measuring what the client can do")
    chosen.ceiling = client_ceiling()

    async def run() -> bool:
        summaries: list[Summary] = []
        async with Session(target, chosen, path, command) as session:
            for point in points:
                screen.note(point.as_json()["text"])
                result = await session.measure(point)
                if result.was_interrupted:
                    return True
                if server_was_gone(result.records) is not None:
                    break
                if stops_early:
                    summaries.append(summarize(read_runs(path)[-1]))
                    if is_saturated(summaries):
                        break
        return False

    try:
        return run_cancellable(run())
    except KeyboardInterrupt:  # between two loads: those before are kept
        if not path.exists():
            raise
        return True
