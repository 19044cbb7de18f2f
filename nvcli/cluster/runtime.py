"""Ray, imported only here: whether it is there, the cluster, and what it has."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import signal
import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nvcli.errors import NvcliError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvcli.config import EngineConfig

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
EXTRA = "pip install 'nvcli[ray]'"


class ClusterError(NvcliError):
    """The cluster cannot be reached, or cannot hold what was asked for."""

    exit_code = 3
    http_status = 503
    code = "cluster_unavailable"


def require_ray() -> Any:
    """The module `ray`. Raises `UsageError` naming the extra that brings it."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "--replicas needs Ray, which is not installed", hint=f"{EXTRA}.", param="replicas"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nvcli reports nothing to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


def connect(address: str | None) -> bool:
    """Join the cluster at the address (or `RAY_ADDRESS`), or start one on this machine.

    -> whether it is ours to shut down: False where this process was connected before.
    Raises `ClusterError` when there is none at the address.
    """
    ray = require_ray()
    if ray.is_initialized():
        return False
    logging.getLogger("ray").setLevel(logging.ERROR)
    _check_reachable(address or os.environ.get("RAY_ADDRESS") or "auto")
    _keep_stdout_ours(ray)

    def init() -> None:
        with _sigterm_kept():
            ray.init(
                # Without an address Ray would join a cluster that somebody else has started here.
                address=address or os.environ.get("RAY_ADDRESS") or "local",
                include_dashboard=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )

    try:
        _in_lasting_thread(init)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0].strip()
        raise _unreachable(address or "this machine", reason) from error
    return True


def _in_lasting_thread(work: Callable[[], None]) -> None:
    """The processes of a Ray that is started here die with the thread that started them (Linux'
    PR_SET_PDEATHSIG), and a server loads in one that ends: then no replica could come back."""
    if threading.current_thread() is threading.main_thread():
        work()
        return
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            done.set_exception(error)
            return
        done.set_result(None)
        threading.Event().wait()

    threading.Thread(target=run, name="nvcli-ray", daemon=True).start()
    done.result()


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray's core takes SIGTERM for a crash: a stack on stderr, and an abort. The handler that was
    there is put back below Python, where any thread may: a server loads in one of its own."""
    getsig, setsig = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    getsig.restype = setsig.restype = ctypes.c_void_p
    getsig.argtypes, setsig.argtypes = [ctypes.c_int], [ctypes.c_int, ctypes.c_void_p]
    before = getsig(signal.SIGTERM)
    try:
        yield
    finally:
        setsig(signal.SIGTERM, before)


def _keep_stdout_ours(ray: Any) -> None:
    """What the cluster reports, as a node that died, goes to the log: whatever `log_to_driver`
    says, Ray prints it to stdout, where a batch writes its lines."""
    worker = ray._private.worker  # there is no public way
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, *args, **kwargs: logger.info(
            "Ray: %s", " ".join(data["lines"])
        )


def _check_reachable(address: str) -> None:
    """Raises at once what Ray would find out in a minute and a half."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise UsageError(
            f"--ray-address takes HOST:PORT or auto, got {address!r}", param="ray_address"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, getattr(error, "strerror", None) or str(error)) from error


def _unreachable(address: str, reason: str) -> ClusterError:
    return ClusterError(
        f"there is no Ray cluster at {address}: {reason}",
        hint="'ray start --head' starts one, 'ray status' shows it.",
        param="ray_address",
    )


def resources_of(config: EngineConfig, num_replicas: int) -> dict[str, float]:
    """What one replica's actor takes: one CPU, and its GPUs where it runs on them. An actor lies
    on one node, so its ranks do.

    Raises `ClusterError` when the cluster as it is cannot hold all replicas.
    """
    ray = require_ray()
    there = ray.cluster_resources()
    num_gpus = int(there.get("GPU", 0))
    size = config.tensor_parallel_size
    if config.device == "cpu" or (config.device == "auto" and not num_gpus):
        if there.get("CPU", 0) < num_replicas:
            raise ClusterError(
                f"{num_replicas} replicas take a CPU each, and the cluster has "
                f"{int(there.get('CPU', 0))}",
                param="replicas",
            )
        return {"num_cpus": 1}
    if num_gpus < num_replicas * size:
        raise ClusterError(
            f"{num_replicas} replicas take {num_replicas * size} GPUs, and the cluster has "
            f"{num_gpus}",
            hint="Fewer --replicas, or a smaller --tensor-parallel-size.",
            param="replicas",
        )
    return {"num_cpus": 1, "num_gpus": size}
