"""What a server is built from: one frozen dataclass, every field with a default and a reason."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Literal

from nvcli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

MetricsAccess = Literal["key", "open", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Raises `UsageError` naming the field when a value is out of range."""

    host: str = "127.0.0.1"
    """Address to listen on; nothing but this machine reaches the default."""
    port: int = 8000
    """Port to listen on; 0 lets the system choose one."""
    uds: Path | None = None
    """Listen on this Unix socket in place of host and port."""
    attach_socket: Path | None = None
    """A Unix socket beside host and port, where `nvcli chat --attach auto` looks."""
    api_keys: tuple[str, ...] = ()
    """A request must bring one of these; none: no key is asked for."""
    served_model_names: tuple[str, ...] = ()
    """Names the model answers to, the first in replies; none: the model's own."""
    max_queue: int = 1024
    """Sequences that may wait beyond those the engine runs at once; more get a 429."""
    request_timeout: float | None = None
    """Seconds after which a request is ended with an error; None: never."""
    cors_origins: tuple[str, ...] = ()
    """Origins that browsers may call from; `*` is any; none: no CORS headers."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a server without a key answers to beside its own (`hosts.py`); `*` is any."""
    metrics: MetricsAccess = "key"
    """Who may read /metrics: with the key as everything else, `open` without, `off` nobody."""
    log_requests: bool = False
    """One log line a request: method, path, status, time; never its content."""
    drain_timeout: float = 30.0
    """Seconds that running requests get after SIGTERM."""
    ready_file: Path | None = None
    """Written when requests are answered: a JSON object with url, pid and model."""
    is_strict: bool = False
    """Unknown request fields are errors."""
    ping_interval: float | None = None
    """Seconds of silence after which a stream gets a comment; None: never."""
    store_limit: int = 1000
    """Stored responses and chat completions, each; the oldest go first."""
    allow_template: bool = False
    """A request may bring its own chat template."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body."""
    storage: Path | None = None
    """Folder for /v1/files and /v1/batches; None: those endpoints are not there."""
    mcp_file: Path | None = None
    """MCP servers that requests may name by label: the usual `mcpServers` JSON."""
    mcp_allow: tuple[str, ...] = ()
    """Beginnings of URLs of MCP servers that requests may bring; none: no URL at all."""
    mcp_timeout: float = 60.0
    """Seconds an MCP server gets to start, to list its tools and to answer a call, each."""
    enable_thinking: bool = True
    """Whether the model thinks where a request leaves it open."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port must be from 0 to 65535, got {self.port}", param="port")
        for name in ("max_queue", "store_limit"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be at least 0", param=name)
        for name in ("request_timeout", "drain_timeout", "ping_interval"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(f"{name} must be a number of seconds, got {value!r}", param=name)
            if value == 0 and name != "drain_timeout":
                raise UsageError(f"{name} must be over 0", param=name)
        if not self.host.strip():  # to the system that is every address
            raise UsageError("host is empty", hint="0.0.0.0 is every address.", param="host")
        for names, param in (
            (self.served_model_names, "served_model_name"),
            (self.cors_origins, "cors_origin"),
            (self.allowed_hosts, "allowed_host"),
        ):
            if not all(name.strip() for name in names):
                raise UsageError(f"{param} is empty", hint="Leave it out.", param=param)
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable():
                raise UsageError("an API key must be printable ASCII", param="api_key_file")

    @property
    def is_loopback(self) -> bool:
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False
