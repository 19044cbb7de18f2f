"""A client that leaves, at any byte and in both modes, leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from nvcli.server.sse import EventStream
from tests.server.conftest import DEFAULTS, Serve, Served
from tests.waiting import PATIENCE_S, until

PATHS = ("/v1/chat/completions", "/v1/completions")


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_leaving_ends_generation_within_a_step(serve: Serve, path: str, stream: bool) -> None:
    served = serve("x" * 400, delay_s=0.2)  # 80 s in all
    question = DEFAULTS if "chat" in path else {"model": "scripted", "prompt": "abc"}
    body = {**question, "stream": stream, "max_tokens": 400}
    with connect(served) as client:
        client.sendall(request_bytes(path, body))
        until(lambda: served.llm.stats().num_running > 0, "it runs", pause_s=0.001)
        if stream:
            client.recv(100)
    served.wait_idle()
    text = served.client.get("/metrics").text
    assert 'nvcli:requests_aborted_total{model_name="scripted"} 1.0' in text
    assert 'nvcli:open_sequences{model_name="scripted"} 0.0' in text


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_at_any_byte_returns_every_block(serve: Serve, stream: bool) -> None:
    served = serve("hello world " * 4, num_blocks=64)
    body = {**DEFAULTS, "n": 2, "stream": stream}
    raw = request_bytes(PATHS[0], body)
    for sent in [*range(1, len(raw), 37), len(raw)]:
        with connect(served) as client:
            client.sendall(raw[:sent])
    for received in range(1, 2000, 130):
        with connect(served) as client:
            client.sendall(raw)
            client.recv(received)
    served.wait_idle()
    assert served.chat()["choices"][0]["message"]["content"] == "hello world " * 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_together", [False, True])
def test_leaving_with_more_requests_in_line(serve: Serve, stream: bool, is_together: bool) -> None:
    """The one that runs ends, and those that wait for it never begin."""
    served = serve("x" * 400, delay_s=0.2)
    raw = request_bytes(PATHS[0], {**DEFAULTS, "stream": stream, "max_tokens": 400})
    with connect(served) as client:
        client.sendall(raw * 3 if is_together else raw)
        until(lambda: served.llm.stats().num_running > 0, "it runs", pause_s=0.001)
        if not is_together:
            client.sendall(raw)
            client.sendall(raw[:-10])
        if stream:
            client.recv(100)
    served.wait_idle()
    text = served.client.get("/metrics").text
    assert 'nvcli:requests_aborted_total{model_name="scripted"} 1.0' in text
    assert len(served.llm.requests) == 1


def test_leaving_while_queued(serve: Serve) -> None:
    served = serve("x" * 30, max_num_seqs=1)
    served.llm.device.gate.clear()
    clients = [connect(served) for _ in range(5)]
    for client in clients:
        client.sendall(request_bytes(PATHS[0], DEFAULTS))
    until(lambda: served.app.state.is_loaded and served.app.state.bridge.num_open == 5)
    for client in clients:
        client.close()
    until(lambda: served.app.state.num_requests == 0, "the server has seen that they left")
    served.llm.device.gate.set()
    served.wait_idle()
    assert served.app.state.bridge.num_aborted == 5


def test_pings_fill_silence_and_are_comments(serve: Serve) -> None:
    from nvcli.server.config import ServerConfig

    served = serve("ab", config=ServerConfig(ping_interval=0.05))
    served.llm.device.gate.clear()
    text = ""
    with served.client.stream("POST", PATHS[0], json={**DEFAULTS, "stream": True}) as response:
        for piece in response.iter_text():
            text += piece
            if ": ping\n\n" in text:
                served.llm.device.gate.set()
    assert text.endswith("data: [DONE]\n\n")


def test_stream_headers(serve: Serve) -> None:
    response = serve("ab").post(PATHS[0], {**DEFAULTS, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


def test_a_stream_that_never_began_is_closed_too() -> None:
    """The client leaves before the first byte could be sent."""
    closed: list[str] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"x"

    async def send(_: Any) -> None:
        await asyncio.sleep(60)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    stream = EventStream(events(), close=lambda: closed.append("closed"))
    asyncio.run(stream({}, receive, send))
    assert closed == ["closed"]
