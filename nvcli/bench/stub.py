"""A server that computes nothing and streams at a known timetable: what the client must recover.

    request i:  first token at ttft + (i mod 100) step,  then one each gap

It measures the client alone: with a timetable of zeros, how many requests a second it can make.
`python -m nvcli.bench.stub TTFT_MS STEP_MS GAP_MS` prints its port, and ends with its parent.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from dataclasses import dataclass

import orjson

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = orjson.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]})
CYCLE = 100


@dataclass(frozen=True, slots=True)
class Timetable:
    """Milliseconds."""

    ttft: float = 0.0
    step: float = 0.0
    gap: float = 0.0

    def first(self, index: int) -> float:
        return self.ttft + (index % CYCLE) * self.step


class Stub:
    def __init__(self, timetable: Timetable) -> None:
        self._timetable = timetable
        self._num_requests = 0

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=2**22)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        size = int(line.split(b":")[1])
                arrived = time.monotonic()
                body = await reader.readexactly(size) if size else b""
                if head.startswith(b"GET"):
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                        b"Content-Length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS)
                    )
                else:
                    await self._answer(orjson.loads(body), arrived, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, request: dict[str, object], arrived: float, writer: asyncio.StreamWriter
    ) -> None:
        index, self._num_requests = self._num_requests, self._num_requests + 1
        table, n = self._timetable, int(str(request.get("max_tokens", 1)))
        prompt = request.get("prompt")
        writer.write(_HEAD)
        event = b'data: {"choices":[{"index":0,"text":"x","token_ids":[1]}]}\n\n'
        for i in range(n):
            await _until(arrived + (table.first(index) + i * table.gap) / 1e3)
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        count = len(prompt) if isinstance(prompt, list) else 1
        usage = {"prompt_tokens": count, "completion_tokens": n, "total_tokens": count + n}
        last = b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))


async def _until(moment: float) -> None:
    """Up to a millisecond late, as the loop's sleep is: polling would take the client's CPU."""
    if (left := moment - time.monotonic()) > 0:
        await asyncio.sleep(left)


async def _main(timetable: Timetable) -> None:
    server = await Stub(timetable).serve()
    os.write(1, b"%d\n" % server.sockets[0].getsockname()[1])
    async with server:
        await server.serve_forever()


def _end_with_parent() -> None:
    """Standard input closes when the parent is gone, however it ended."""
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_main(Timetable(*map(float, sys.argv[1:4]))))
