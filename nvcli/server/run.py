"""The life of `nvcli serve`: listen, load, answer, drain, end.

The port is bound first, so that one in use is told before anything is loaded; while the model loads
requests get a 503. SIGTERM or SIGINT refuses new work, lets what runs end within the drain timeout
and exits with 0; a second signal ends at once. SIGHUP asks the engine to replace its replicas
(`hangup.py`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import json
import os
import signal
import socket
import stat
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.errors import NvcliError, UsageError
from nvcli.heap import frozen_heap
from nvcli.paths import why_not_writable, write_whole
from nvcli.server.app import create_app
from nvcli.server.hangup import Hangup
from nvcli.server.state import shutting_down
from nvcli.text.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nvcli.server.app import App
    from nvcli.server.config import ServerConfig
    from nvcli.server.engine import ServerEngine

BACKLOG = 2048
KEEP_ALIVE_S = 65  # longer than what proxies in front of us keep
CLOSE_TIMEOUT_S = 5
MAX_FILES = 65_536


class PortError(NvcliError):
    """The address cannot be listened on."""

    code = "address_unavailable"


@dataclass(slots=True)
class Listener:
    socket: socket.socket
    url: str


def listen(config: ServerConfig) -> Listener:
    """Raises `PortError` telling who may hold the address."""
    if config.uds is not None:
        return _listen_unix(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        # With the protocol named and the option inherited, replies do not wait for an ACK.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((config.host, config.port))
        sock.listen(BACKLOG)
    except OSError as exc:
        place = f"{config.host}:{config.port}"
        if exc.errno == errno.EADDRINUSE:
            raise PortError(
                f"{place} is in use by another process",
                hint=f"'ss -ltnp sport = :{config.port}' shows it; or give --port 0.",
            ) from exc
        raise PortError(f"cannot listen on {place}: {exc.strerror or exc}") from exc
    port = sock.getsockname()[1]
    shown = f"[{config.host}]" if ":" in config.host else config.host
    return Listener(sock, f"http://{shown}:{port}")


def _listen_unix(path: Path) -> Listener:
    """A socket only this user may open; one that nobody listens on is replaced."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise PortError(f"{path} exists and is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()
            else:
                raise PortError(f"{path} is in use by another process")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as exc:
        raise PortError(f"cannot listen on {path}: {exc.strerror or exc}") from exc
    finally:
        os.umask(mask)
    sock.listen(BACKLOG)
    return Listener(sock, f"unix:{path}")


def serve(
    config: ServerConfig,
    load: Callable[[], ServerEngine],
    *,
    note: Callable[[str], None],
    warn: Callable[[str], None],
) -> int:
    """Run until a signal; the exit code. Raises what `load` raises, `PortError`, and `UsageError`
    for a ready file that could not be written."""
    _allow_connections()
    ready = config.ready_file  # what would be refused after minutes of loading is so before
    if ready is not None and (reason := why_not_writable(ready, replaces=True)):
        raise UsageError(f"cannot write {ready}: {reason}", param="ready_file")
    server = _Server(config, load, note)
    if not config.is_loopback and not config.api_keys:
        warn(f"anybody who reaches {config.host} can use this server; give --api-key-file")
    try:
        return _run_loop(server)
    finally:
        server.remove_files()


def _allow_connections() -> None:
    """As many open files as this process may have: each stream and each slow client holds one."""
    try:
        import resource
    except ImportError:  # not on every platform
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_FILES)), hard))


def _run_loop(server: _Server) -> int:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.run(server.run())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(server.run())


class _Server:
    def __init__(
        self, config: ServerConfig, load: Callable[[], ServerEngine], note: Callable[[str], None]
    ) -> None:
        self.config = config
        self._load = load
        self._note = note
        self._num_signals = 0
        self._stop = asyncio.Event()
        self._app: App = create_app(config)  # a storage that cannot be had leaves no socket behind
        self._listener = listen(config)
        self._sockets = [self._listener.socket]
        self._paths = [config.uds] if config.uds is not None else []
        if config.attach_socket is not None:
            with contextlib.suppress(PortError, OSError):  # another server of this user has it
                config.attach_socket.parent.mkdir(mode=0o700, exist_ok=True)
                self._sockets.append(_listen_unix(config.attach_socket).socket)
                self._paths.append(config.attach_socket)
        self._llm: ServerEngine | None = None
        self._has_ready_file = False
        self._hangup = Hangup(note, lambda: self._on_signal(signal.SIGHUP))

    async def run(self) -> int:
        uvicorn = _make_uvicorn(self._app)
        answering = asyncio.create_task(uvicorn.serve(sockets=self._sockets))
        loading = asyncio.create_task(_in_daemon_thread(self._load))
        stopping = asyncio.create_task(self._stop.wait())
        with self._signals():
            try:
                await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if loading.done():
                    self._ready(loading.result())
                    with frozen_heap():
                        await self._watch(stopping)
                        await self._drain()
            finally:
                self._app.state.stop_accepting()
                uvicorn.should_exit = True
                await asyncio.wait({answering}, timeout=CLOSE_TIMEOUT_S + 1)
                await asyncio.to_thread(self._app.state.mcp.close)
                if self._llm is not None:
                    await asyncio.to_thread(self._llm.close)
        if not loading.done():
            self.remove_files()
            os._exit(0)  # the thread that loads cannot be stopped
        return 0

    def _ready(self, llm: ServerEngine) -> None:
        self._llm = llm
        self._app.state.attach(llm)
        startup = getattr(llm, "startup", None)
        for stage, seconds in getattr(startup, "stage_s", {}).items():
            self._note(f"{stage.replace('_', ' ')} {seconds:.2f} s")
        self._note(f"serving {self._app.state.model} on {self._listener.url}")
        if self.config.ready_file is not None:
            model = self._app.state.model
            _write_ready_file(self.config.ready_file, self._listener.url, model)
            self._has_ready_file = True

    async def _watch(self, stopping: asyncio.Task[Any]) -> None:
        """Wait for a signal, or for the engine to die. Raises what ended it."""
        assert self._llm is not None
        while not stopping.done():
            await asyncio.wait({stopping}, timeout=1.0)
            if self._llm.error is not None:
                raise self._llm.error

    async def _drain(self) -> None:
        state = self._app.state
        num_running = state.num_requests - len(state.arriving)
        state.stop_accepting()  # the batches may take their time
        if num_running:
            self._note(f"draining {counted(num_running, 'request')}; a second signal ends at once")
        if state.batches is not None:
            await asyncio.to_thread(state.batches.stop)
        if not await state.drain(self.config.drain_timeout):
            self._note(f"{counted(state.num_requests, 'request')} did not end in time")
            # Whoever waits for the engine, or for a tool, is told while there is a connection;
            # cancelled with it, a stream would break off. The engine itself may hang.
            state.bridge.end(shutting_down())
            tools = asyncio.to_thread(state.mcp.close)
            await asyncio.gather(tools, state.drain(CLOSE_TIMEOUT_S))

    def remove_files(self) -> None:
        paths = list(self._paths)
        if self._has_ready_file and self.config.ready_file is not None:
            paths.append(self.config.ready_file)
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()
        self._has_ready_file = False

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM, signal.SIGINT]
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        if hasattr(signal, "SIGHUP"):
            numbers.append(signal.SIGHUP)
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self.remove_files()
            sys.stderr.flush()
            os._exit(128 + number)
        self._stop.set()

    def _on_hangup(self) -> None:
        llm = None if self._stop.is_set() else self._llm
        self._hangup.take(llm, self.config.drain_timeout)


def _make_uvicorn(app: App) -> Any:
    import uvicorn

    from nvcli.server.http_protocol import GuardedProtocol

    class Server(uvicorn.Server):
        """uvicorn without its own signal handlers."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=GuardedProtocol,
            log_level="error",  # a client's nonsense is not worth a line
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
    )


async def _in_daemon_thread(work: Callable[[], Any]) -> Any:
    """The result of `work`; a thread of the pool would have to end before the process can."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # nobody who gives up cancels it: the thread goes on

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(exc)

    threading.Thread(target=run, name="nvcli-load", daemon=True).start()
    return await asyncio.wrap_future(future)


def _write_ready_file(path: Path, url: str, model: str) -> None:
    """Raises `UsageError`."""
    value = {"url": url, "pid": os.getpid(), "model": model}
    try:
        write_whole(path, json.dumps(value).encode() + b"\n")
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror or exc}", param="ready_file") from exc
