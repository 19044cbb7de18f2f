"""The load client: drives an OpenAI endpoint and writes down what it saw. No judgement here.

The schedule is made before the start; the sender sleeps to absolute moments of the monotonic clock,
and how late it was is part of the record. A read is stamped before it is parsed. Failures and
timeouts are records like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from nvcli.bench.record import ERROR, OK, TIMEOUT, UNFINISHED, RequestRecord, now_ns
from nvcli.errors import NvcliError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvcli.bench.workload import Planned

SPIN_NS = 1_500_000  # a loop's sleep ends up to a millisecond late: the rest is polled


class EndpointError(NvcliError):
    """The server cannot be reached, or refuses what the benchmark needs."""

    code = "endpoint_unavailable"


@dataclass(slots=True)
class Endpoint:
    url: str  # without /v1
    model: str
    api_key: str | None = None
    is_strict: bool = False  # it refuses fields that OpenAI's API lacks

    def body(self, planned: Planned) -> tuple[str, dict[str, Any]]:
        """Path and body of a request."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": planned.n_out,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.is_strict:
            body |= {"min_tokens": planned.n_out, "ignore_eos": True, "return_token_ids": True}
        prompt = planned.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return "/v1/chat/completions", {**body, "messages": prompt}
        return "/v1/completions", {**body, "prompt": prompt}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


@dataclass(slots=True)
class Load:
    """Closed: `concurrency` places. Open: `times`, with `cap` places at most."""

    concurrency: int | None = None
    times: list[float] | None = None
    cap: int | None = None
    duration_s: float | None = None
    num_requests: int | None = None
    stagger_s: float = 0.0


@dataclass(slots=True)
class LoadResult:
    records: list[RequestRecord] = field(default_factory=list)
    num_planned: int = 0
    was_interrupted: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0


class EventReader:
    """Splits a byte stream into the data of its events, whatever way it was cut."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._held = (self._held + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def take_event(record: RequestRecord, data: bytes, moment: int) -> None:
    """Count an event's tokens. Raises `EndpointError` for an error event."""
    if data == b"[DONE]":
        return
    event = orjson.loads(data)
    if event.get("error"):
        error = event["error"]
        raise EndpointError(str(error.get("message", error) if isinstance(error, dict) else error))
    usage = event.get("usage")
    if usage:
        record.n_in, record.n_out = usage["prompt_tokens"], usage["completion_tokens"]
        record.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    count = 0
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        delta = choice.get("delta") or choice
        if ids is not None:
            count += len(ids)
        elif any(delta.get(k) for k in ("text", "content", "reasoning_content", "tool_calls")):
            count += 1
    if not count:
        return
    if record.chunks and record.chunks[-1][0] == moment:
        count += record.chunks.pop()[1]
    record.chunks.append((moment, count))


class Client:
    """One session; `send` never raises for a request's sake."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._session: Any = None

    async def __aenter__(self) -> Client:
        import aiohttp

        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(_connecting)
        trace.on_connection_create_end.append(_connected)
        url = self.endpoint.url
        if url.startswith("unix:"):
            connector: Any = aiohttp.UnixConnector(url.removeprefix("unix:"), limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._base = "http://localhost" if url.startswith("unix:") else url
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[trace],
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *args: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> bytes | None:
        """The body of a GET; None when it is refused."""
        import aiohttp

        try:
            async with self._session.get(self._base + path, headers=self.endpoint.headers) as got:
                return await got.read() if got.status == 200 else None
        except (aiohttp.ClientError, OSError):
            return None

    async def send(self, planned: Planned, record: RequestRecord) -> None:
        """Fill the record. Cancelled, it keeps what came until then."""
        path, body = self.endpoint.body(planned)
        data = orjson.dumps(body)
        record.s_ns = record.end_ns = now_ns()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(path, data, record)
            record.status = OK if record.chunks else ERROR
            record.error = None if record.chunks else "no token arrived"
        except TimeoutError:
            record.status, record.error = TIMEOUT, f"no end within {self._timeout_s:g} s"
        except asyncio.CancelledError:
            record.end_ns = now_ns()
            raise
        except Exception as exc:  # noqa: BLE001 - whatever broke, it is this request's failure
            record.status, record.error = ERROR, str(exc)[:200] or type(exc).__name__
        record.end_ns = record.chunks[-1][0] if record.status == OK else now_ns()

    async def _exchange(self, path: str, data: bytes, record: RequestRecord) -> None:
        async with self._session.post(
            self._base + path,
            data=data,
            headers=self.endpoint.headers,
            trace_request_ctx=record,
        ) as response:
            if response.status != 200:
                text = (await response.content.read(2000)).decode("utf-8", "replace")
                raise EndpointError(f"HTTP {response.status}: {text[:160]}")
            reader = EventReader()
            async for part in response.content.iter_any():
                moment = now_ns()
                for event in reader.feed(part):
                    take_event(record, event, moment)


async def _connecting(session: object, context: Any, params: object) -> None:
    if (record := context.trace_request_ctx) is not None:
        record.conn_ns = -now_ns()


async def _connected(session: object, context: Any, params: object) -> None:
    if (record := context.trace_request_ctx) is not None:
        record.conn_ns += now_ns()


async def sleep_until(moment_ns: int) -> None:
    """To an absolute moment, within tens of microseconds."""
    while (left := moment_ns - now_ns()) > 0:
        await asyncio.sleep((left - SPIN_NS) / 1e9 if left > SPIN_NS else 0)


# --- loops ---------------------------------------------------------------------------------------


class LoadRun:
    """One load on one client. `on_record` gets each record as it ends."""

    def __init__(
        self, client: Client, load: Load, planned: Iterator[Planned],
        on_record: Callable[[RequestRecord], None],
    ) -> None:  # fmt: skip
        self._client = client
        self._load = load
        self._planned = planned
        self._on_record = on_record
        self._result = LoadResult()
        self._open: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None

    async def run(self) -> LoadResult:
        """Until everything sent has ended. Cancelled (Ctrl-C): what runs is kept as unfinished."""
        result, load = self._result, self._load
        start, cpu = now_ns(), _cpu_s()
        try:
            if load.times is not None:
                await self._open_loop(start, load.times)
            else:
                await self._closed_loop(start)
            if self._open:
                await asyncio.wait(self._open)
            if self._bug is not None:
                raise self._bug
        except asyncio.CancelledError:
            result.was_interrupted = True
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
        result.cpu_s, result.wall_s = _cpu_s() - cpu, (now_ns() - start) / 1e9
        return result

    async def _open_loop(self, start: int, times: list[float]) -> None:
        start += 50_000_000  # the first moment must not be past already
        places = asyncio.Semaphore(self._load.cap) if self._load.cap else None
        for at in times:
            planned = next(self._planned)
            s_star = start + int(at * 1e9)
            await sleep_until(s_star)
            if places is not None:
                await places.acquire()
            self._launch(planned, s_star, places)

    def _launch(self, planned: Planned, s_star: int, places: asyncio.Semaphore | None) -> None:
        async def one() -> None:
            try:
                await self._one(planned, s_star)
            finally:
                if places is not None:
                    places.release()

        self._result.num_planned += 1
        task = asyncio.create_task(one())
        self._open.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()  # a request's failure is a record; this is ours

    async def _closed_loop(self, start: int) -> None:
        load = self._load
        assert load.concurrency is not None, "a closed loop has places"
        end = start + int(load.duration_s * 1e9) if load.duration_s is not None else None

        async def place(index: int) -> None:
            free = start + int(load.stagger_s * 1e9 * index / (load.concurrency or 1))
            await sleep_until(free)
            while (end is None or free < end) and (
                load.num_requests is None or self._result.num_planned < load.num_requests
            ):
                self._result.num_planned += 1
                free = (await self._one(next(self._planned), free)).end_ns

        tasks = [asyncio.create_task(place(i)) for i in range(load.concurrency)]
        self._open.update(tasks)
        await asyncio.gather(*tasks)

    async def _one(self, planned: Planned, s_star: int) -> RequestRecord:
        record = new_record(planned, s_star)
        try:
            await self._client.send(planned, record)
        finally:
            self._keep(record)
        if record.status == ERROR:
            await asyncio.sleep(0.01)  # a server that refuses at once is not hammered
        return record

    def _keep(self, record: RequestRecord) -> None:
        self._result.records.append(record)
        self._on_record(record)


def new_record(planned: Planned, s_star: int) -> RequestRecord:
    return RequestRecord(f"r{planned.index}", s_star, s_star, s_star, UNFINISHED, n_in=planned.n_in)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def find_model(client: Client) -> str:
    """What the server serves. Raises `EndpointError`."""
    body = await client.get("/v1/models")
    if body is None:
        raise EndpointError(
            f"{client.endpoint.url} does not answer GET /v1/models",
            hint="Is the server there, and is it OpenAI's API?",
        )
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        return str(orjson.loads(body)["data"][0]["id"])
    raise EndpointError(f"{client.endpoint.url} names no model")


async def probe(client: Client, planned: Planned) -> float:
    """One request before the run: seconds it took. An endpoint that refuses our extra fields gets
    OpenAI's only. Raises `EndpointError`.
    """
    for is_strict in (client.endpoint.is_strict, True):
        client.endpoint.is_strict = is_strict
        start = time.monotonic()
        record = new_record(planned, now_ns())
        await client.send(planned, record)
        if record.status == OK:
            return time.monotonic() - start
    raise EndpointError(f"{client.endpoint.url} refuses a request: {record.error}")
