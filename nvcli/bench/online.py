"""`bench serve` and the points of `bench sweep`: load over HTTP, with the server's gauges."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.bench import machine
from nvcli.bench.checked import LARGEST
from nvcli.bench.client import Client, Endpoint, probe, served_model
from nvcli.bench.engine_run import model_name
from nvcli.bench.limits import resources
from nvcli.bench.load_run import Load, LoadRun
from nvcli.bench.metrics import mean
from nvcli.bench.nvml import Sampler
from nvcli.bench.offline import base_header
from nvcli.bench.precision import Divergence, Precision
from nvcli.bench.record import OK, RunWriter, id_in, now_ns
from nvcli.bench.workload import Arrival, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nvcli.bench.ceiling import Ceiling
    from nvcli.bench.load_run import LoadResult
    from nvcli.bench.target import Target
    from nvcli.bench.traces import Trace
    from nvcli.bench.workload import Planned

GAUGE_S = 0.25
_METRIC = re.compile(rb"^(?:nvcli|vllm):([a-z_]+?)(?:_total)?(?:\{[^}]*\})? ([0-9.e+-]+)", re.M)
_GAUGES = {
    b"num_requests_running": "running",
    b"num_requests_waiting": "waiting",
    b"kv_cache_usage_perc": "kv_usage",
    b"num_preemptions": "preemptions",
    b"kv_blocks": "num_blocks",
}


@dataclass(slots=True)
class Point:
    """One load: a closed loop of `concurrency`, or an open one at `rate` (capped)."""

    concurrency: int | None = None
    rate: float | None = None
    arrival: Arrival = field(default_factory=lambda: Arrival.parse("poisson"))
    duration_s: float | None = None
    num_requests: int | None = None
    trace: Trace | None = None  # its times and lengths, already paced
    until_ci: float | None = None  # end when the intervals are as narrow as this share

    def as_json(self) -> dict[str, Any]:
        if self.trace is not None:
            rate: float | None = self.trace.rate
            arrival, cv = f"trace {self.trace.digest}", self.trace.gap_cv
            text = f"{self.trace.kind} trace, {rate:.3g}/s, gap CV {cv:.2g}"
            if not math.isfinite(self.trace.rate):
                rate, text = None, f"{self.trace.kind} trace, all at once"
        elif self.rate is not None:
            rate, arrival, cv = self.rate, self.arrival.text, self.arrival.cv
            text = f"open loop, {arrival} {rate:g}/s"
            if self.concurrency:
                text += f", at most {self.concurrency}"
        else:
            text = f"closed loop, c = {self.concurrency}"
            return {"mode": "closed", "concurrency": self.concurrency, "text": text}
        return {
            "mode": "open",
            "rate": rate,
            "arrival": arrival,
            "arrival_cv": cv,
            "cap": self.concurrency,
            "text": text,
        }

    def load(self, workload: Workload, stagger_s: float) -> Load:
        if self.trace is not None:
            times = [e.at_s for e in self.trace.entries[: self.num_requests]]
            if self.duration_s is not None:
                times = [t for t in times if t <= self.duration_s]
            return Load(times=times, cap=self.concurrency)
        if self.rate is None:
            return Load(
                concurrency=self.concurrency,
                duration_s=self.duration_s,
                num_requests=self.num_requests,
                stagger_s=stagger_s,
            )
        duration = self.duration_s
        if duration is None:
            assert self.num_requests is not None, "a time or a number"
            duration = (10 * self.num_requests / self.rate + 60) * workload.turns
        # --rate counts requests; a conversation brings as many as it has turns
        drawn = workload.schedule(self.rate / workload.turns, self.arrival, duration)
        first = None if self.num_requests is None else -(-self.num_requests // workload.turns)
        return Load(times=list(itertools.islice(drawn, first)), cap=self.concurrency)


@dataclass(slots=True)
class Options:
    workload: Workload
    timeout_s: float = 300.0
    warmup: str | float = "auto"
    slo: dict[str, float] = field(default_factory=dict)
    with_gpu: bool = False
    num_gpus: int = 1
    ceiling: Ceiling | None = None


class Session:
    """A client on a target; measures one point after another into one file."""

    def __init__(self, target: Target, options: Options, path: Path, command: str) -> None:
        self.target = target
        self.options = options
        self.path = path
        self.command = command
        self._stay_s = 0.0  # of a request: a lone one's, then that of the last load
        self._endpoint = Endpoint(target.url, target.model or "", target.api_key)
        self._client = Client(self._endpoint, timeout_s=options.timeout_s)

    async def __aenter__(self) -> Session:
        await self._client.__aenter__()
        try:
            served = await served_model(self._client, self.target.model)
            self._endpoint.model = served["id"]
            longest = served.get("max_model_len")
            if isinstance(longest, int):
                self.target.max_len = min(longest, self.target.max_len or longest)
            self.options.workload.check_fits(self.target.max_len)
            planned = self._planned()
            await probe(self._client, next(planned))  # connections, compilations
            self._stay_s = await probe(self._client, next(planned))
        except BaseException:
            await self._client.__aexit__()
            raise
        return self

    async def __aexit__(self, *args: object) -> None:
        await self._client.__aexit__()

    def _planned(self, trace: Trace | None = None, salt: int | None = None) -> Iterator[Planned]:
        source = trace or self.options.workload
        return source.requests(**self._bounds(self._salt() if salt is None else salt))

    def _bounds(self, salt: int) -> dict[str, Any]:
        target = self.target
        return {"vocab_size": target.vocab_size, "max_len": target.max_len, "salt": salt}

    def _salt(self) -> int:
        return 0 if self.options.workload.cache == "keep" else now_ns() % 2**32

    async def measure(self, point: Point) -> LoadResult:
        """Run one load to its end, and store it. Raises `EndpointError`."""
        load = point.load(self.options.workload, self._stagger_s(point))
        load.max_len = self.target.max_len
        salt = self._salt()
        for repeating in self.options.workload.warm_up(**self._bounds(salt)):
            await probe(self._client, repeating)
        header = self._header(point, await self._gauges())
        if point.until_ci is not None:
            load.looks.append(Precision(header, share=point.until_ci))
        if point.rate is not None:
            load.looks.append(Divergence(header))
        with RunWriter(self.path, header) as run:
            watching = asyncio.create_task(self._watch(run))
            try:
                planned = self._planned(point.trace, salt)
                with machine.GcWatch() as gc_watch:
                    result = await LoadRun(self._client, load, planned, run.request).run()
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
            run.finish(
                planned=result.num_planned,
                interrupted=result.was_interrupted,
                client_cpu_s=result.cpu_s,
                wall_s=result.wall_s,
                overloaded=result.is_overloaded,
                drained=result.num_planned == point.num_requests,
                **gc_watch.as_json(),
            )
        if stay := mean([r.end_ns - r.s_star_ns for r in result.records if r.status == OK]):
            self._stay_s = stay / 1e9
        return result

    def _stagger_s(self, point: Point) -> float:
        """What the first sends of a closed loop are spread over: the stay of a request in it."""
        found, workload = self.target.calibration, self.options.workload
        if found is None or point.concurrency is None:
            return self._stay_s
        traffic = found.perf_model.under(round(workload.in_len.mean), workload.out_len.mean)
        return max(self._stay_s, traffic.closed(point.concurrency, found.slots).e2e_s)

    def _header(self, point: Point, gauges: dict[str, float]) -> dict[str, Any]:
        options, target = self.options, self.target
        device, name = "cpu", machine.cpu_name()
        found = target.calibration
        if found is not None and found.hardware.name != name:
            device, name = "cuda", found.hardware.name
        header: dict[str, Any] = {
            **base_header(self.command, id_in(self.path)),
            "model": {"name": model_name(self._endpoint.model), "max_model_len": target.max_len},
            "environment": machine.environment(device, name if target.is_own else "server"),
            "engine": target.engine,
            "load": point.as_json(),
            "workload": _workload_json(options.workload, point.trace),
            "until_ci": point.until_ci,
            "warmup": options.warmup,
            "slo": options.slo,
            "gpu_metrics": options.with_gpu,
            "timeout_s": options.timeout_s,
            "client": asdict(options.ceiling) if options.ceiling is not None else {},
            "server": {"is_own": target.is_own, "strict": self._endpoint.is_strict},
        }
        if found is not None:
            header["slots"] = found.slots
            header["perf_model"] = found.perf_model.as_json(found.hardware)
            header["resources"] = resources(
                num_blocks=int(gauges.get("num_blocks", found.num_blocks or 0)),
                block_size=found.block_size,
                slots=found.slots,
            )
        return header

    async def _gauges(self) -> dict[str, float]:
        """The server's gauges now; empty where it has none."""
        body = await self._client.get("/metrics")
        if body is None:
            return {}
        found = {}
        for name, value in _METRIC.findall(body):
            with contextlib.suppress(ValueError):  # no number is no sample
                if name in _GAUGES and 0 <= (number := float(value)) < LARGEST:
                    found[_GAUGES[name]] = number
        return found

    async def _watch(self, run: RunWriter) -> None:
        sampler = Sampler(self.options.num_gpus) if self.options.with_gpu else None
        with sampler or contextlib.nullcontext():
            is_there = True
            try:
                while is_there or sampler is not None:
                    values = await self._gauges() if is_there else {}
                    is_there = "running" in values
                    if values:
                        run.gauge(t_ns=now_ns(), **values)
                    await asyncio.sleep(GAUGE_S)
                    _keep_samples(run, sampler)
            finally:
                _keep_samples(run, sampler)


def _keep_samples(run: RunWriter, sampler: Sampler | None) -> None:
    for sample in sampler.take() if sampler is not None else ():
        run.gauge(**sample)


def _workload_json(workload: Workload, trace: Trace | None) -> dict[str, Any]:
    value = workload.as_json()
    if trace is not None:
        value |= {"hash": trace.digest[:6], "text": f"{trace.kind} trace, {workload.cache} cache"}
        for name in ("in_len", "out_len", "data", "prefix"):
            value[name] = None
    return value
