"""A client that stops reading its reply costs a bounded memory for a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState as UvicornState

from nvcli.server.bridge import EngineBridge, OutputGroups
from nvcli.server.http_protocol import DEPARTURE_S, PORTION_BYTES, GuardedProtocol, _in_kernel
from nvcli.types import FinishReason, RequestOutput
from tests.server.conftest import DEFAULTS, Serve
from tests.server.test_disconnect import request_bytes
from tests.waiting import PATIENCE_S, until

CHAT = "/v1/chat/completions"


def test_its_request_ends_and_no_other(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "departure_s", 0.3)
    served = serve("x" * 4000, delay_s=0.05, max_model_len=8192, num_blocks=4096)  # 200 s
    served._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its clients get it
    body = {**DEFAULTS, "stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 4000}
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
        served._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # who comes later
        client.sendall(request_bytes(CHAT, body))
        left = 'nvcli:requests_aborted_total{model_name="scripted"} 1.0'
        until(lambda: left in served.client.get("/metrics").text, "the request is aborted")
        assert len(served.chat(max_tokens=2)["choices"]) == 1
        served.wait_idle()
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(1 << 16):
                received += piece
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


def test_outputs_that_nobody_reads_take_no_room_each() -> None:
    async def run() -> tuple[int, list[RequestOutput]]:
        groups = OutputGroups(_bridge(), [])
        groups._num_open = 1
        longest = 0
        for i in range(20_000):
            groups.take([RequestOutput(request_id="r", index=0, text="ab", token_ids=(i,))])
            longest = max(longest, len(groups._ready))
        end = RequestOutput(request_id="r", index=0, finish_reason=FinishReason.LENGTH)
        groups.take([end])
        return longest, await groups.next_outputs()

    longest, outputs = asyncio.run(run())
    assert longest < 1000
    assert "".join(output.text for output in outputs) == "ab" * 20_000
    assert [id_ for output in outputs for id_ in output.token_ids] == [*range(20_000)]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def _bridge() -> EngineBridge:
    class Engine:
        max_num_seqs = 1

    engine: Any = Engine()
    return EngineBridge(engine, max_queue=1)


# --- the clock, exactly --------------------------------------------------------------------------


@dataclass
class Timer:
    seconds: float
    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Loop:
    timers: list[Timer] = field(default_factory=list)

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(seconds, call))
        return self.timers[-1]


@dataclass
class Transport:
    """What it has sent is taken from `unsent` by the test."""

    unsent: int = 0
    is_closed: bool = False
    is_aborted: bool = False

    def write(self, data: bytes) -> None:
        self.unsent += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True


async def _app(scope: Any, receive: Any, send: Any) -> None:
    pass


@pytest.fixture
def made() -> tuple[GuardedProtocol, Transport, Loop]:
    loop, transport = Loop(), Transport()
    any_loop: Any = loop
    config = uvicorn.Config(_app, log_config=None, lifespan="off")
    protocol = GuardedProtocol(config, UvicornState(), {}, any_loop)
    protocol.connection_made(transport)
    loop.timers.clear()  # of what arrives
    return protocol, transport, loop


Made = tuple[GuardedProtocol, Transport, Loop]


def fire(loop: Loop) -> None:
    (timer,) = loop.timers
    assert timer.seconds == DEPARTURE_S
    loop.timers.clear()
    timer.call()


def test_a_reply_that_is_taken_stops_the_clock(made: Made) -> None:
    protocol, transport, loop = made
    for _ in range(3):
        protocol.transport.write(b"x" * 100)
    assert len(loop.timers) == 1
    transport.unsent = 0
    fire(loop)
    assert loop.timers == []
    protocol.transport.write(b"x")
    assert len(loop.timers) == 1


@pytest.mark.parametrize(
    ("written", "taken", "is_cut"),
    [
        (100, 0, True),
        (100, 99, True),
        (100, 100, False),
        (10 * PORTION_BYTES, PORTION_BYTES - 1, True),
        (10 * PORTION_BYTES, PORTION_BYTES, False),
    ],
)
def test_a_portion_is_due_each_time(made: Made, written: int, taken: int, is_cut: bool) -> None:
    protocol, transport, loop = made
    protocol.transport.write(b"x" * written)
    transport.unsent -= taken
    protocol.transport.write(b"more")  # is not due yet
    fire(loop)
    assert transport.is_aborted == is_cut
    if not is_cut:
        fire(loop)  # of the second portion nothing was taken
        assert transport.is_aborted


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what its kernel keeps")
def test_what_the_kernel_keeps_was_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        with client, ours:
            ours.setblocking(False)
            assert _in_kernel(ours) == 0
            written = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    written += ours.send(b"x" * 65536)
            kept = _in_kernel(ours)
            assert 0 < kept < written  # the rest is in the client's own kernel
            client.settimeout(PATIENCE_S)
            taken = 0
            while taken < written:
                taken += len(client.recv(65536))
            until(lambda: _in_kernel(ours) == 0)  # its word of that may take a moment
    assert _in_kernel(None) == 0
    left, right = socket.socketpair()
    with left, right:
        left.send(b"x")
        assert _in_kernel(left) == 0


def test_the_clock_goes_on_after_the_connection_was_closed(made: Made) -> None:
    """Closing lets what was written go out first, and nobody takes it."""
    protocol, transport, loop = made
    protocol.transport.write(b"x" * 100)
    protocol.transport.close()
    assert transport.is_closed
    fire(loop)
    assert transport.is_aborted


def test_no_clock_outlives_its_connection(made: Made) -> None:
    protocol, _, loop = made
    protocol.transport.write(b"x" * 100)
    (timer,) = loop.timers
    protocol.connection_lost(None)
    assert timer.is_cancelled
