"""`bench serve` and the points of `bench sweep`: load over HTTP, with the server's gauges."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.bench import calibrate, machine
from nvcli.bench.children import stub_server
from nvcli.bench.client import Client, Endpoint, find_model, probe
from nvcli.bench.engine_run import model_name
from nvcli.bench.limits import limit_rows
from nvcli.bench.load_run import Load, LoadRun
from nvcli.bench.offline import base_header
from nvcli.bench.record import RunWriter, now_ns
from nvcli.bench.workload import Arrival, Lengths, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nvcli.bench.calibrate import Calibration
    from nvcli.bench.load_run import LoadResult
    from nvcli.bench.traces import Trace

GAUGE_S = 0.25
ANY_VOCABULARY = 1000  # token ids that every vocabulary has
_METRIC = re.compile(rb"^(?:nvcli|vllm):([a-z_]+?)(?:_total)?(?:\{[^}]*\})? ([0-9.e+-]+)", re.M)
_GAUGES = {
    b"num_requests_running": "running",
    b"num_requests_waiting": "waiting",
    b"kv_cache_usage_perc": "kv_usage",
    b"num_preemptions": "preemptions",
    b"kv_blocks": "num_blocks",
}


@dataclass(slots=True)
class Target:
    """The server under load."""

    url: str
    api_key: str | None = None
    model: str | None = None  # what requests name; None: the first that it serves
    vocab_size: int = ANY_VOCABULARY
    max_len: int | None = None
    calibration: Calibration | None = None  # of nvcli's own server
    is_own: bool = False


@dataclass(slots=True)
class Point:
    """One load: a closed loop of `concurrency`, or an open one at `rate` (capped)."""

    concurrency: int | None = None
    rate: float | None = None
    arrival: Arrival = field(default_factory=lambda: Arrival.parse("poisson"))
    duration_s: float | None = None
    num_requests: int | None = None
    trace: Trace | None = None  # its times and lengths, already paced

    def as_json(self) -> dict[str, Any]:
        if self.trace is not None:
            rate, cv = self.trace.rate, self.trace.gap_cv
            return {
                "mode": "open",
                "rate": rate,
                "arrival": f"trace {self.trace.digest}",
                "arrival_cv": cv,
                "cap": self.concurrency,
                "text": f"{self.trace.kind} trace, {rate:.3g}/s, gap CV {cv:.2g}",
            }
        if self.rate is None:
            return {
                "mode": "closed",
                "concurrency": self.concurrency,
                "text": f"closed loop, c = {self.concurrency}",
            }
        text = f"open loop, {self.arrival.text} {self.rate:g}/s"
        if self.concurrency:
            text += f", at most {self.concurrency}"
        return {
            "mode": "open",
            "rate": self.rate,
            "arrival": self.arrival.text,
            "arrival_cv": self.arrival.cv,
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
            duration = 10 * self.num_requests / self.rate + 60
        drawn = workload.schedule(self.rate, self.arrival, duration)
        return Load(times=list(itertools.islice(drawn, self.num_requests)), cap=self.concurrency)


@dataclass(slots=True)
class Options:
    workload: Workload
    timeout_s: float = 300.0
    warmup: str | float = "auto"
    slo: dict[str, float] = field(default_factory=dict)
    with_gpu: bool = False
    ceiling: float | None = None


class Session:
    """A client on a target; measures one point after another into one file."""

    def __init__(self, target: Target, options: Options, path: Path, command: str) -> None:
        self.target = target
        self.options = options
        self.path = path
        self.command = command
        self.wait_s = 0.0  # a lone request's time
        self._client: Client | None = None

    async def __aenter__(self) -> Session:
        endpoint = Endpoint(self.target.url, self.target.model or "", self.target.api_key)
        self._client = await Client(endpoint, timeout_s=self.options.timeout_s).__aenter__()
        try:
            if not endpoint.model:
                endpoint.model = await find_model(self._client)
            planned = self._planned()
            await probe(self._client, next(planned))  # connections, compilations
            self.wait_s = await probe(self._client, next(planned))
        except BaseException:
            await self._client.__aexit__()
            raise
        return self

    async def __aexit__(self, *args: object) -> None:
        assert self._client is not None
        await self._client.__aexit__()

    def _planned(self, trace: Trace | None = None) -> Iterator[Any]:
        source = trace or self.options.workload
        is_cold = self.options.workload.cache == "cold"
        return source.requests(
            vocab_size=self.target.vocab_size,
            max_len=self.target.max_len,
            salt=now_ns() % 2**32 if is_cold else 0,
        )

    async def measure(self, point: Point) -> LoadResult:
        """Run one load to its end, and store it."""
        assert self._client is not None
        load = point.load(self.options.workload, self.wait_s)
        gauges = await self._gauges()
        with RunWriter(self.path, self._header(point, gauges)) as run:
            watching = asyncio.create_task(self._watch(run))
            try:
                planned = self._planned(point.trace)
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
            )
        return result

    def _header(self, point: Point, gauges: dict[str, float]) -> dict[str, Any]:
        from nvcli.bench.record import new_id

        options, target = self.options, self.target
        assert self._client is not None
        run_id = self.path.stem if not self.path.exists() else new_id()
        device = "cpu"
        name = machine.cpu_name()
        found = target.calibration
        if found is not None and found.hardware.name != name:
            device, name = "cuda", found.hardware.name
        header: dict[str, Any] = {
            **base_header(self.command, run_id),
            "model": {"name": model_name(self._client.endpoint.model)},
            "environment": machine.environment(device, name if target.is_own else "server"),
            "load": point.as_json(),
            "workload": _workload_json(options.workload, point.trace),
            "warmup": options.warmup,
            "slo": options.slo,
            "timeout_s": options.timeout_s,
            "client": {"ceiling_requests_per_s": options.ceiling},
            "server": {"is_own": target.is_own, "strict": self._client.endpoint.is_strict},
        }
        if found is not None:
            header["slots"] = found.slots
            header["perf_model"] = {
                "shape": asdict(found.shape),
                "cost": found.cost.as_json(),
                "budget": found.budget,
                "depth": found.depth,
                "hardware": asdict(found.hardware),
            }
            header["limits"] = limit_rows(
                num_blocks=int(gauges.get("num_blocks", found.num_blocks or 0)),
                block_size=found.block_size,
                slots=found.slots,
                n_in=options.workload.in_len.mean,
                n_out=options.workload.out_len.mean,
            )
        return header

    async def _gauges(self) -> dict[str, float]:
        """The server's gauges now; empty where it has none."""
        assert self._client is not None
        body = await self._client.get("/metrics")
        if body is None:
            return {}
        return {
            _GAUGES[name]: float(value) for name, value in _METRIC.findall(body) if name in _GAUGES
        }

    async def _watch(self, run: RunWriter) -> None:
        with contextlib.ExitStack() as stack:
            gpu = stack.enter_context(machine.nvml()) if self.options.with_gpu else None
            is_there = True
            while True:
                values: dict[str, float] = {}
                if is_there:
                    values = await self._gauges()
                    is_there = "running" in values
                if gpu is not None:
                    lib, handle = gpu
                    values["power_w"] = lib.nvmlDeviceGetPowerUsage(handle) / 1000
                    values["gpu_busy"] = lib.nvmlDeviceGetUtilizationRates(handle).gpu
                if values:
                    run.gauge(t_ns=now_ns(), **values)
                await asyncio.sleep(GAUGE_S)


def _workload_json(workload: Workload, trace: Trace | None) -> dict[str, Any]:
    value = workload.as_json()
    if trace is not None:
        value |= {"hash": trace.digest[:6], "text": f"{trace.kind} trace, {workload.cache} cache"}
        for name in ("in_len", "out_len", "data", "prefix"):
            value[name] = None
    return value


# --- what the client can do ----------------------------------------------------------------------


def client_ceiling(duration_s: float = 1.0, concurrency: int = 16) -> float:
    """Requests a second of this client against a server that answers at once, one token each: what
    it can do at least, since both share this machine."""

    async def run(url: str) -> float:
        workload = Workload(in_len=Lengths.parse("8"), out_len=Lengths.parse("1"))
        async with Client(Endpoint(url, "stub"), timeout_s=10) as client:
            planned = workload.requests(vocab_size=100)
            load = Load(concurrency=concurrency, duration_s=duration_s)
            result = await LoadRun(client, load, planned, lambda record: None).run()
        return len(result.records) / result.wall_s

    with stub_server(0, 0, 0) as url:
        return asyncio.run(run(url))


def own_vocabulary(name: str) -> tuple[int, int]:
    """(token ids that may be used, longest context) of a model on this machine, without torch."""
    from nvcli.models.config import ModelConfig
    from nvcli.models.resolve import resolve_model
    from nvcli.text import Tokenizer

    folder = resolve_model(name)
    config = ModelConfig.from_hf(folder)
    size = config.vocab_size
    with contextlib.suppress(Exception):  # random weights need no tokenizer
        size = min(size, Tokenizer.from_folder(folder).size)
    return size, config.max_model_len


def own_target(url: str, name: str, max_len: int | None) -> Target:
    vocab_size, longest = own_vocabulary(name)
    found = calibrate.find(model_name(name))
    served = found.max_model_len if found is not None else None
    return Target(
        url,
        api_key=os.environ.get("NVCLI_API_KEY"),
        vocab_size=vocab_size,
        max_len=min(v for v in (max_len, longest, served) if v is not None),
        calibration=found,
        is_own=True,
    )


def server_flags(fields: dict[str, Any]) -> list[str]:
    """The engine's options as `nvcli serve` takes them."""
    names = {"memory_utilization": "gpu-memory-utilization"}
    flags = []
    for name, value in fields.items():
        if value is not None:
            flag = f"--{names.get(name, name).replace('_', '-')}"
            flags += [flag] if value is True else [flag, str(value)]
    return flags
