"""A Ray cluster that this process starts for itself: reached from this machine only, and ended with
the process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from nvcli.cluster.reaper import MARK
from nvcli.paths import module_command, module_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

_REAPER = "nvcli.cluster.reaper"
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_KEEPS_MARK = "SPT_NOENV"  # else a process that gives itself a title writes over its environment
_TOKEN_NAMES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_END_S = 15.0


class OwnCluster:
    """Ray's daemons die with the thread that started them, but by SIGKILL, and their helpers then
    look for the dead for a minute. So a process of ours (`reaper`) waits for the end of this one
    and kills what is left. It knows Ray's processes by a mark in the environment they began with.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)
        self._reaper: subprocess.Popen[bytes] | None = None
        if sys.platform == "linux":  # elsewhere nobody may read another process's environment
            self._reaper = subprocess.Popen(
                [*module_command(_REAPER), self._mark],
                stdin=subprocess.PIPE,  # closed by the kernel at the latest
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a signal for all of this one's group is not for it
                env=module_environment(),
            )

    @contextlib.contextmanager
    def starting(self, ray: Any) -> Iterator[None]:
        """The environment in which `ray.init` is to start it."""
        own_token()
        with (
            _environment(MARK, self._mark),
            _environment(_KEEPS_MARK, "1"),
            _on_loopback(ray),
        ):
            yield

    def end(self) -> None:
        """After `ray.shutdown`: whatever that has left ends. Safe to call twice."""
        if self._reaper is None or self._reaper.stdin is None:
            return
        self._reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.wait(_END_S)


def own_token() -> None:
    """Other users of this machine reach the cluster, and whoever has its token may run code on it;
    recent Rays ask for one. It gets one of its own. Ray's own way is one file in the home folder,
    where two first starts at once write over each other's."""
    if not any(name in os.environ for name in _TOKEN_NAMES):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """What is started meanwhile listens on 127.0.0.1 only. By itself Ray has a dozen ports open on
    every address of the machine, and takes 127.0.0.1 as a node's address for a mistake. It has a
    switch for systems without clusters, which its processes find in the environment, and which
    this one has read already. Undone afterwards: the next cluster may be one of many machines."""
    constants = ray._private.ray_constants
    before = getattr(constants, "ENABLE_RAY_CLUSTER", True)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment(_LOOPBACK, "0"):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
