"""Which names a server without a key answers to: the defence against DNS rebinding.

A web page of `evil.example` may have that name point to 127.0.0.1 once it is loaded. To the browser
its requests to `http://evil.example:8000` are then the page's own, so that it may send anything and
read every reply. Only their `Host` header tells, where a browser writes the name it was asked for:

    an address              let in: no name was asked for, so none can have been bent
    no Host, or an empty    let in: no browser sends that (HTTP/1.0, some health checks)
    localhost, *.localhost  let in: they always mean the machine that asks
    --host, --allowed-host  let in
    dotless, .local, ...    let in where the server listens wider than this machine: nobody on the
                            internet can have such a name, and containers and LANs use them
    any other name          refused

Behind loopback the fifth line is strict too: in a foreign network, such names are the network's.
"""

from __future__ import annotations

import contextlib
import re
import socket
from functools import partial
from typing import TYPE_CHECKING

from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

ANY = "*"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]*)(?::\d*)?")
_NAME = re.compile(r"(?:\*\.)?[\w-]+(?:\.[\w-]+)*")
_PRIVATE = (".local", ".internal", ".home.arpa", ".lan")  # no registry sells names under these


class AllowedHosts:
    """bound: what the server listens on. names: allowed beside it, `*.a.b` for all below `a.b`, `*`
    for any. Raises `UsageError` for what can be no name."""

    def __init__(self, names: Iterable[str], *, bound: str, is_loopback: bool) -> None:
        self.is_any = False
        self._is_loopback = is_loopback
        self._names = {"localhost", _plain(bound)}
        self._suffixes = {".localhost"}
        for name in names:
            self._allow(_plain(name), name)

    def _allow(self, name: str, given: str) -> None:
        if given == ANY:
            self.is_any = True
        elif not _is_address(name.strip("[]")) and _NAME.fullmatch(name) is None:
            raise UsageError(
                f"allowed_host takes a host name without a port, *.NAME or *, got {given!r}",
                param="allowed_host",
            )
        elif name.startswith("*."):
            self._suffixes.add(name[1:])
        else:
            self._names.add(name)

    def let_in(self, host: str) -> bool:
        """Whether a request with this `Host` header is answered; its port is left out of account,
        because one that was forwarded says another."""
        match = _HOST.fullmatch(host)
        if match is None:
            return self.is_any
        name = _plain(match[1])
        if self.is_any or not name or name.startswith("[") or _is_address(name):
            return True
        if name in self._names or name.endswith(tuple(self._suffixes)):
            return True
        return not self._is_loopback and ("." not in name or name.endswith(_PRIVATE))


def _plain(name: str) -> str:
    """As names are compared: small letters, without the dot that ends a full one."""
    return name.lower().removesuffix(".")


def _is_address(text: str) -> bool:
    """Also in the short forms that curl knows and no browser sends, such as 127.1."""
    for read in (socket.inet_aton, partial(socket.inet_pton, socket.AF_INET6)):
        with contextlib.suppress(OSError, ValueError):
            read(text)
            return True
    return False
