"""The load client: one request to an OpenAI endpoint, and what was seen of it. No judgement here.

A read is stamped before it is parsed. Failures and timeouts are records like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from nvcli.bench.checked import tokens
from nvcli.bench.record import ERROR, OK, TIMEOUT, UNFINISHED, RequestRecord, now_ns
from nvcli.errors import NvcliError

if TYPE_CHECKING:
    from nvcli.bench.workload import Planned

# Of this machine: a server that was not reached for them was not gone.
_OUR_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)


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


class EventReader:
    """Splits a byte stream into the data of its events, whatever way it was cut."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._held = (self._held + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def take_event(
    record: RequestRecord, data: bytes, moment: int, answer: list[int] | None = None
) -> None:
    """Count an event's tokens; their ids go to `answer`. Raises `EndpointError`."""
    if data == b"[DONE]":
        return
    try:
        _take(record, orjson.loads(data), moment, answer)
    except (ValueError, AttributeError, KeyError, TypeError) as exc:
        text = data[:80].decode("utf-8", "replace")
        raise EndpointError(f"an event that is none of OpenAI's API: {text}") from exc


def _take(
    record: RequestRecord, event: dict[str, Any], moment: int, answer: list[int] | None
) -> None:
    if event.get("error"):
        error = event["error"]
        raise EndpointError(str(error.get("message", error) if isinstance(error, dict) else error))
    usage = event.get("usage")
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        n_in, n_out = usage["prompt_tokens"], usage["completion_tokens"]
        record.n_in, record.n_out = tokens(n_in, "n_in"), tokens(n_out, "n_out")
        record.cached = None if cached is None else tokens(cached, "cached")
    count = 0
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        delta = choice.get("delta") or choice
        if ids is not None:
            count += len(ids)
            if answer is not None:
                answer += ids
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
        """The body of a GET; None when it is refused, or takes longer than a request may."""
        import aiohttp

        headers = self.endpoint.headers
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.get(self._base + path, headers=headers) as got,
            ):
                return await got.read() if got.status == 200 else None
        except (aiohttp.ClientError, OSError):  # a TimeoutError is an OSError
            return None

    async def send(self, planned: Planned, record: RequestRecord) -> list[int]:
        """Fill the record; the answer's token ids, where the server tells them.

        Cancelled, it keeps what came until then.
        """
        import aiohttp

        path, body = self.endpoint.body(planned)
        data = orjson.dumps(body)
        answer: list[int] = []
        record.s_ns = record.end_ns = now_ns()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(path, data, record, answer)
            record.status = OK if record.chunks else ERROR
            record.error = None if record.chunks else "no token arrived"
        except TimeoutError:
            record.status, record.error = TIMEOUT, f"no end within {self._timeout_s:g} s"
        except asyncio.CancelledError:
            record.end_ns = now_ns()
            raise
        except Exception as exc:  # noqa: BLE001 - whatever broke, it is this request's failure
            record.status, record.error = ERROR, str(exc)[:200] or type(exc).__name__
            broken = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError)
            is_ours = getattr(exc, "errno", None) in _OUR_LIMITS
            record.lost = isinstance(exc, broken) and not is_ours
        record.end_ns = record.chunks[-1][0] if record.status == OK else now_ns()
        return answer

    async def _exchange(
        self, path: str, data: bytes, record: RequestRecord, answer: list[int]
    ) -> None:
        async with self._session.post(
            self._base + path, data=data, headers=self.endpoint.headers, trace_request_ctx=record
        ) as response:
            if response.status != 200:
                text = (await response.content.read(2000)).decode("utf-8", "replace")
                raise EndpointError(f"HTTP {response.status}: {text[:160]}")
            reader = EventReader()
            async for part in response.content.iter_any():
                moment = now_ns()
                for event in reader.feed(part):
                    take_event(record, event, moment, answer)


async def _connecting(session: object, context: Any, params: object) -> None:
    if (record := context.trace_request_ctx) is not None:
        record.conn_ns = -now_ns()


async def _connected(session: object, context: Any, params: object) -> None:
    if (record := context.trace_request_ctx) is not None:
        record.conn_ns += now_ns()


def new_record(planned: Planned, s_star: int) -> RequestRecord:
    return RequestRecord(
        planned.id, s_star, s_star, s_star, UNFINISHED, n_in=planned.n_in, turn=planned.turn
    )


async def served_model(client: Client, name: str | None) -> dict[str, Any]:
    """What GET /v1/models tells of the model, or of the first where none is named: its id, and of
    nvcli and vLLM its longest context. Raises `EndpointError` where nothing was named or found.
    """
    body = await client.get("/v1/models")
    if body is None and name is None:
        raise EndpointError(
            f"{client.endpoint.url} does not answer GET /v1/models",
            hint="Is the server there, and is it OpenAI's API?",
        )
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError, StopIteration):
        listed = orjson.loads(body or b"{}")["data"]
        found = listed[0] if name is None else next(m for m in listed if m["id"] == name)
        return {**found, "id": str(found["id"])}
    if name is None:
        raise EndpointError(f"{client.endpoint.url} names no model")
    return {"id": name}


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
    raise EndpointError(f"{client.endpoint.url} does not answer a request: {record.error}")
