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
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nvcli.cluster.own_cluster import OwnCluster
from nvcli.errors import NvcliError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvcli.config import EngineConfig

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_AGAIN_WITHIN_S = 30.0  # what fails later has waited for something that is not there
EXTRA = "pip install 'nvcli[ray]'"
_CRASH_HANDLER = "_ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb"

_own: OwnCluster | None = None  # as Ray's connection, one a process


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
    Raises `ClusterError` when there is none at the address, or none can be started.
    """
    global _own
    ray = require_ray()
    if ray.is_initialized():
        return False
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Without an address Ray would join a cluster that somebody else has started here.
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    _check_reachable(where)
    _keep_stdout_ours(ray)
    _end_own()  # Ray's connection to it has ended some other way
    _own = OwnCluster() if where == "local" else None

    def init() -> None:
        with _sigterm_kept(ray), _own.starting(ray) if _own else contextlib.nullcontext():
            ray.init(
                address=where,
                include_dashboard=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )

    try:
        _try_twice(ray, init, where)
    except ClusterError:
        _end_own()
        raise
    return True


def _try_twice(ray: Any, init: Callable[[], None], where: str) -> None:
    began = time.monotonic()
    try:
        _in_lasting_thread(init)
    except Exception as error:
        logger.info("Ray, the first attempt", exc_info=error)
        with contextlib.suppress(Exception):  # what was half made
            ray.shutdown()
        if time.monotonic() - began > _AGAIN_WITHIN_S:
            raise _unreachable(where, reason_of(error)) from error
        try:  # a dozen processes begin together or are looked for, beside others that come and go
            _in_lasting_thread(init)
        except Exception as again:
            raise _unreachable(where, reason_of(again)) from again


def disconnect() -> None:
    """Leave the cluster that `connect` has joined, and end it where it was started here."""
    require_ray().shutdown()
    _end_own()


def _end_own() -> None:
    global _own
    own, _own = _own, None
    if own is not None:
        own.end()


def reason_of(error: BaseException) -> str:
    """Ray's errors are pages; their first line says what happened."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__).rstrip(".")


def _in_lasting_thread(work: Callable[[], None]) -> None:
    """The processes of a Ray that is started here die with the thread that started them (Linux'
    PR_SET_PDEATHSIG). One that loads a server's model ends: then no replica could come back. This
    one ends when `work` has failed, and with it what was half started."""
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
def _sigterm_kept(ray: Any) -> Iterator[None]:
    """Ray's core takes SIGTERM for a crash: a stack on stderr, and an abort. The handler that was
    there is put back below Python, where any thread may: a server loads in one of its own. Ray sets
    its own once in a process, in the midst of a start of seconds; where it can be asked to before
    that, no signal of those seconds meets it."""
    getsig, setsig = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    getsig.restype = setsig.restype = ctypes.c_void_p
    getsig.argtypes, setsig.argtypes = [ctypes.c_int], [ctypes.c_int, ctypes.c_void_p]
    before = getsig(signal.SIGTERM)
    try:
        with contextlib.suppress(AttributeError, OSError):  # another Ray may not have it
            getattr(ctypes.CDLL(ray._raylet.__file__), _CRASH_HANDLER)(b"nvcli", False)
            setsig(signal.SIGTERM, before)
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


def _unreachable(where: str, reason: str) -> ClusterError:
    if where == "local":
        named = (os.environ.get(name) for name in ("RAY_TMPDIR", "TMPDIR"))  # as Ray looks for it
        folder = next((folder for folder in named if folder), "/tmp")
        return ClusterError(
            f"Ray cannot be started on this machine: {reason}",
            hint=f"Its logs are in {folder}/ray/session_latest/logs.",
        )
    return ClusterError(
        f"there is no Ray cluster at {where}: {reason}",
        hint="'ray start --head' starts one, 'ray status' shows it.",
        param="ray_address",
    )


def resources_of(config: EngineConfig, num_replicas: int) -> dict[str, float]:
    """What one replica's actor takes: a CPU, or its GPUs where it runs on them. An actor lies on
    one node, so its ranks do.

    Raises `ClusterError` when the cluster as it is cannot hold all replicas.
    """
    nodes = [node["Resources"] for node in require_ray().nodes() if node["Alive"]]
    num_gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    size = config.tensor_parallel_size
    is_one = num_replicas == 1
    replicas, each = (
        ("1 replica takes", "") if is_one else (f"{num_replicas} replicas take", " each")
    )
    if config.device == "cpu" or (config.device == "auto" and not num_gpus):
        num_cpus = sum(int(node.get("CPU", 0)) for node in nodes)
        if num_cpus < num_replicas:
            raise ClusterError(
                f"{replicas} a CPU{each}, and the cluster has {num_cpus}", param="replicas"
            )
        return {"num_cpus": 1}
    hint = "Fewer --replicas, or a smaller --tensor-parallel-size."
    if num_gpus < num_replicas * size:
        raise ClusterError(
            f"{replicas} {_gpus(num_replicas * size)}, and the cluster has {num_gpus}",
            hint=hint,
            param="replicas",
        )
    places = sum(int(node.get("GPU", 0)) // size for node in nodes)
    if places < num_replicas:
        raise ClusterError(
            f"{replicas} {_gpus(size)} of one machine{each}, and the cluster has room for {places}",
            hint=hint,
            param="replicas",
        )
    return {"num_cpus": 0, "num_gpus": size}  # a machine may have fewer CPUs for us than GPUs


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
