"""Ray, imported only here: whether it is there, the cluster, and what it has."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from nvcli.errors import NvcliError, UsageError

if TYPE_CHECKING:
    from nvcli.config import EngineConfig

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
    try:
        ray.init(
            address=address,
            include_dashboard=False,
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0].strip()
        raise _unreachable(address or "this machine", reason) from error
    return True


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
