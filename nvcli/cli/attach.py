"""`--attach`: a running server in place of a model in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nvcli.config import EngineConfig
from nvcli.errors import NvcliError, UsageError
from nvcli.paths import expand_user

if TYPE_CHECKING:
    from nvcli.client import ServerModel
    from nvcli.repl.screen import Screen


def own_socket() -> Path | None:
    """The only place that `auto` looks at, and only if it is this user's."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(folder) / "nvcli" / "serve.sock"
    try:
        is_own = folder.startswith("/") and path.is_socket() and path.stat().st_uid == os.getuid()
    except OSError:
        return None
    return path if is_own else None


def attach(
    where: str, config: EngineConfig, screen: Screen, *, is_model_given: bool
) -> ServerModel | None:
    """`where`: the value of --attach. None: load the model here. Raises `NvcliError` when a server
    that was named is not there."""
    if where == "never":
        return None
    from nvcli.client import ServerModel

    key = os.environ.get("NVCLI_API_KEY", "").strip() or None
    has_engine_flags = config != EngineConfig(model=config.model)
    if where != "auto":
        url, uds = _target(where)
        if has_engine_flags:
            screen.warn("the server runs with its own engine flags; those given here do nothing")
        model = config.model if is_model_given else None
        found = ServerModel(url, uds=uds, model=model, key=key)
        screen.note(f"attached to {where}, {found.model_name}")
        return found
    socket = own_socket()
    if socket is None or has_engine_flags:
        return None
    try:
        found = ServerModel("http://localhost", uds=str(socket), model=config.model, key=key)
    except NvcliError:
        return None  # it does not run any more, or serves another model
    screen.note(f"attached to {socket}, {found.model_name}; --attach never loads it here")
    return found


def _target(value: str) -> tuple[str, str | None]:
    """(URL, socket) of what the flag names."""
    if value.startswith(("http://", "https://")):
        return value, None
    path = value.removeprefix("unix:").removeprefix("//")
    if value == "uds":
        socket = own_socket()
        if socket is None:
            raise NvcliError(
                "there is no server of yours at $XDG_RUNTIME_DIR/nvcli/serve.sock",
                hint='Start one: nvcli serve --uds "$XDG_RUNTIME_DIR/nvcli/serve.sock".',
            )
        return "http://localhost", str(socket)
    if value.startswith(("unix:", "/", ".", "~")):
        return "http://localhost", str(expand_user(path))
    raise UsageError(
        f"--attach takes auto, never, uds, a URL or the path of a socket, got {value!r}"
    )
