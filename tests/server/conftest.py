"""A scripted server: `serve(script)` gives a client of the app over a scripted engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from nvcli.server.app import App, create_app
from nvcli.server.config import ServerConfig
from nvcli.server.http_protocol import GuardedProtocol
from nvcli.server.run import listen
from nvcli.text import Tokenizer
from tests.server.scripted_llm import Script, ScriptedLLM, make_tokenizer
from tests.waiting import PATIENCE_S, until


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("server-tokenizer"))


class Server(uvicorn.Server):
    """Ends at once when it is told to, and leaves no connection to the garbage collector."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_told = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # the headers of every reply
        await self.is_told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        while connections := self.server_state.connections:
            for connection in [*connections]:
                connection.transport.abort()
            await asyncio.sleep(0)
        if tasks := {*self.server_state.tasks}:  # a file that was sent is closed by its task
            await asyncio.wait(tasks, timeout=1)


class Served:
    """A running server and a client of it."""

    def __init__(self, llm: Any, config: ServerConfig) -> None:
        self.llm = llm
        self.app: App = create_app(config, llm)
        listener = listen(ServerConfig(port=0))
        self._socket, self.url = listener.socket, listener.url
        settings = uvicorn.Config(
            self.app, log_config=None, access_log=False, lifespan="off", http=GuardedProtocol
        )
        self._server = Server(settings)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.client = httpx.Client(  # a context of TLS takes a tenth of a second to make
            base_url=self.url, timeout=PATIENCE_S, trust_env=False, verify=False
        )
        until(lambda: self._server.started or not self._thread.is_alive(), pause_s=0.002)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._socket])

    def connections(self) -> list[Any]:
        """The transports of the clients that are connected now."""
        return [connection.transport for connection in self._server.server_state.connections]

    def close(self) -> None:
        self.client.close()
        self._loop.call_soon_threadsafe(self._server.is_told.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.app.state.mcp.close()
        self.llm.close()

    # --- requests -----------------------------------------------------------------------------

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def post_text(self, path: str, text: str | bytes) -> httpx.Response:
        """A body as it stands, which is said to be JSON."""
        headers = {"content-type": "application/json"}
        return self.client.post(path, content=text, headers=headers)

    def prompt(self, number: int = -1) -> str:
        """What the engine was asked to go on from, as text."""
        ids = self.llm.prompts[number]
        text: str = self.llm.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def ask(self, path: str, body: Any) -> dict[str, Any]:
        """The answer to what must succeed."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        value: dict[str, Any] = response.json()
        return value

    def chat(self, **fields: Any) -> dict[str, Any]:
        """A chat completion that must succeed."""
        return self.ask("/v1/chat/completions", {**DEFAULTS, **fields})

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of every event, `[DONE]` as text."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        return parse_events(response.text)

    def chat_stream(self, **fields: Any) -> list[dict[str, Any]]:
        events = self.stream("/v1/chat/completions", {**DEFAULTS, **fields})
        assert events[-1] == "[DONE]"
        return events[:-1]

    def wait_idle(self) -> None:
        """Until the engine holds nothing."""
        until(
            lambda: self.llm.is_idle() and self.app.state.bridge.num_open == 0,
            f"the server is idle: {self.llm.stats()}, {self.app.state.bridge.num_open}",
            pause_s=0.002,
        )

    def wait_left(self) -> None:
        """Until the server has seen that its clients left, and holds nothing of theirs."""
        until(lambda: self.app.state.num_requests == 0, "no request is on its way")
        self.wait_idle()


DEFAULTS: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


def parse_events(text: str) -> list[Any]:
    events: list[Any] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        if data:
            assert len(data) == 1
            events.append(data[0] if data[0] == "[DONE]" else json.loads(data[0]))
    return events


Serve = Callable[..., Served]


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Serve]:
    """`serve("text")`, or with a script of ids; options of the config and of the device."""
    running: list[Served] = []

    def start(
        script: Script | str, *, config: ServerConfig | None = None, **options: Any
    ) -> Served:
        if isinstance(script, str):
            token_ids = tokenizer.encode(script)
            script = lambda _: token_ids  # noqa: E731
        llm = ScriptedLLM(tokenizer, script, **options)
        served = Served(llm, config or ServerConfig())
        running.append(served)
        return served

    yield start
    for served in running:
        served.close()
