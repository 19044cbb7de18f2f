"""The state of a running server: what was loaded, whether it ends, what is on its way."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.concurrency import run_in_threadpool

from nvcli.errors import InvalidParameterError
from nvcli.server.batches import BatchManager
from nvcli.server.bridge import EngineBridge
from nvcli.server.errors import NotReadyError, QueueFullError, UnknownModelError
from nvcli.server.files import FileStore
from nvcli.server.mcp import McpHub
from nvcli.server.metrics import Metrics
from nvcli.server.remote_engine import RemoteEngine
from nvcli.server.sealing import Sealer
from nvcli.server.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.server.config import ServerConfig
    from nvcli.server.engine import ServerEngine
    from nvcli.server.response_run import Record
    from nvcli.text import Tokenizer
T = TypeVar("T")

LARGE_REQUEST = 1 << 20  # bytes of body
NUM_LARGE = 2  # that are read and tokenized at once
MAX_BODIES = 16  # of the largest size, on their way at once; smaller ones in proportion


def shutting_down() -> NotReadyError:
    return NotReadyError("the server is shutting down", hint="Try another one.")


class ServerState:
    """One per app. Everything but `load` runs in the event loop's thread."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.created = int(time.time())
        self.is_draining = False
        self.num_requests = 0  # HTTP requests on their way, those about the server left out
        self.num_body_bytes = 0  # of requests on their way
        self.arriving: set[asyncio.Timeout] = set()  # limits of those whose body is not all here
        self.metrics = Metrics(self)
        self.responses = Store(config.store_limit)
        self.completions = Store(config.store_limit)
        self.live: dict[str, Record] = {}  # responses in the background
        self.sealer = Sealer()
        self.mcp = McpHub(config.mcp_file, config.mcp_allow, timeout_s=config.mcp_timeout)
        self.files: FileStore | None = None
        self.batches: BatchManager | None = None
        if config.storage is not None:
            self.files = FileStore(config.storage)
            self.batches = BatchManager(config.storage, self.files)
        self._bridge: EngineBridge | None = None
        self._idle = asyncio.Event()
        self._large_requests = asyncio.Semaphore(NUM_LARGE)

    # --- the engine -------------------------------------------------------------------------------

    def attach(self, llm: ServerEngine) -> None:
        """The model is there: requests are answered from now on."""
        self._bridge = EngineBridge(llm, max_queue=self.config.max_queue)
        self._bridge.on_hand_over = self.metrics.observe_hand_over
        self._bridge.on_finished = self.metrics.observe_finished
        if isinstance(llm, RemoteEngine):
            llm.listen(asyncio.get_running_loop())
        if self.batches is not None:
            self.batches.start(llm, self.model_names)

    @property
    def is_loaded(self) -> bool:
        return self._bridge is not None

    @property
    def bridge(self) -> EngineBridge:
        """Raises `NotReadyError` while there is no model."""
        if self._bridge is None:
            raise NotReadyError("the model is loading", hint="Try again in a moment.")
        return self._bridge

    @property
    def llm(self) -> ServerEngine:
        return self.bridge.llm

    @property
    def tokenizer(self) -> Tokenizer:
        return self.llm.tokenizer

    def check_accepting(self) -> None:
        """Raises `NotReadyError` unless new work is taken."""
        if self.is_draining:
            raise shutting_down()
        if not self.bridge.llm.is_alive:
            raise NotReadyError("the engine has stopped", hint="The server must be restarted.")

    # --- names ------------------------------------------------------------------------------------

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.served_model_names or (self.llm.model_name,)

    @property
    def model(self) -> str:
        return self.model_names[0]

    def check_model(self, name: str | None, *, is_optional: bool = False) -> str:
        """The name to answer with. Raises `UnknownModelError`."""
        if name is None:
            if is_optional:
                return self.model
            raise InvalidParameterError("model is missing", param="model")
        if name not in self.model_names:
            known = ", ".join(self.model_names[:8])
            raise UnknownModelError(
                f"there is no model {name[:200]!r}", hint=f"This server has {known}.", param="model"
            )
        return name

    # --- bounds -----------------------------------------------------------------------------------

    def count_body(self, num_bytes: int) -> None:
        """So much more of a body is here. Raises `QueueFullError` when all bodies are too much."""
        self.num_body_bytes += num_bytes
        if self.num_body_bytes > MAX_BODIES * self.config.max_body_bytes:
            raise QueueFullError(
                "the requests that are being sent are too large together",
                hint="Try again in a moment.",
            )

    async def in_thread(self, work: Callable[..., T], *args: Any, num_bytes: int) -> T:
        """The result of `work` on a request of this size. Large ones take turns, so that they leave
        threads, memory and cores to others."""
        if num_bytes < LARGE_REQUEST:
            return await run_in_threadpool(work, *args)
        async with self._large_requests:
            return await run_in_threadpool(work, *args)

    # --- draining ---------------------------------------------------------------------------------

    def enter(self) -> None:
        self.num_requests += 1

    def leave(self) -> None:
        self.num_requests -= 1
        if self.num_requests == 0:
            self._idle.set()

    def stop_accepting(self) -> None:
        """Refuse new work, and requests that are still being sent: they have not begun, and their
        clients may take as long as they like."""
        if not self.is_draining:
            self.is_draining = True
            for limit in self.arriving:
                limit.reschedule(0.0)

    async def drain(self, timeout: float) -> bool:
        """Refuse new work and wait for what runs. False when time ran out."""
        self.stop_accepting()
        deadline = time.monotonic() + timeout
        while self.num_requests > 0:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), left)
            except TimeoutError:
                return False
        return True
