"""The machine: its peak rates, and everything about it that can change a number.

Peak rates of known GPUs are datasheet values, dense; those of others, and of CPUs, are measured
with one copy and one matrix product, and said to be measured.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import re
import resource
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvcli import __version__
from nvcli.bench.perf_model import Hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# name -> (bytes/s, dense bfloat16 FLOP/s, bytes of memory), NVIDIA datasheets
DATASHEET = {
    "B200": (8.0e12, 2250e12, 180e9),
    "H200": (4.8e12, 989e12, 141e9),
    "H100 NVL": (3.9e12, 835e12, 94e9),
    "H100 PCIe": (2.0e12, 756e12, 80e9),
    "H100": (3.35e12, 989e12, 80e9),
    "GH200": (4.0e12, 989e12, 96e9),
    "A100-SXM4-80GB": (2.039e12, 312e12, 80e9),
    "A100": (1.555e12, 312e12, 40e9),
    "L40S": (864e9, 362e12, 48e9),
    "L4": (300e9, 121e12, 24e9),
    "A10": (600e9, 125e12, 24e9),
    "RTX 4090": (1008e9, 165e12, 24e9),
    "RTX 5090": (1792e9, 209e12, 32e9),
    "RTX 3090": (936e9, 71e12, 24e9),
}


def longest_fit(name: str, table: Collection[str]) -> str | None:
    """The longest key that is part of a device's name and ends with a word: an L40 is no L4."""
    found = (key for key in table if re.search(rf"{re.escape(key)}(?![a-z0-9])", name, re.I))
    return max(found, key=len, default=None)


def known_gpu(name: str) -> Hardware | None:
    """Datasheet rates, by any part of the device's name."""
    key = longest_fit(name, DATASHEET)
    return None if key is None else Hardware(key, *DATASHEET[key][:2])


def hardware_of(device: str, device_name: str, dtype: str) -> Hardware:
    """Peak rates of where the model runs; float32 on a GPU gets no tensor cores, so measured."""
    known = known_gpu(device_name) if device == "cuda" and dtype != "float32" else None
    return known or measure(device, device_name, dtype)


def measure(device: str, name: str, dtype: str) -> Hardware:
    """The best of a few copies and matrix products."""
    import torch

    kind = getattr(torch, dtype)
    is_cuda = device == "cuda"
    size = 2**28 if is_cuda else 2**26  # bytes, beyond the caches
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    n = 4096 if is_cuda else 1024
    left = torch.randn(n, n, device=device).to(kind)
    right = torch.randn(n, n, device=device).to(kind)

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(7):
            if is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    copy = best(lambda: target.copy_(source))
    product = best(lambda: left @ right)
    return Hardware(name, 2 * size / copy, 2 * n**3 / product, "measured")


# --- what may change a number --------------------------------------------------------------------


def environment(device: str, device_name: str) -> dict[str, Any]:
    """Facts for the run's record, without names of users, hosts or folders."""
    found: dict[str, Any] = {
        "device": device_name,
        "nvcli": __version__,
        "commit": os.environ.get("NVCLI_COMMIT"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "virtualised": is_virtualised(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "versions": {n: v for n in ("torch", "triton") if (v := _version(n))},
    }
    if device == "cuda":
        from nvcli.bench.nvml import gpu_facts

        found["gpu"] = gpu_facts()
    return found


def clock() -> dict[str, Any]:
    info = time.get_clock_info("monotonic")
    return {"name": info.implementation, "resolution_ns": info.resolution * 1e9}


def created() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def is_virtualised() -> bool | None:
    """Whether the CPU says that a hypervisor runs it; None where it cannot be asked."""
    flags = _read("/proc/cpuinfo")
    return None if flags is None else " hypervisor" in flags


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class GcWatch:
    """How long Python's garbage collector stopped this process while the block ran.

    What is there before is collected once and then left alone: passes over libraries and earlier
    runs stop a client for tens of milliseconds.
    """

    def __init__(self) -> None:
        self.total_s = self.longest_s = 0.0
        self._start = 0.0

    def __enter__(self) -> GcWatch:
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self._tell)
        return self

    def __exit__(self, *args: object) -> None:
        gc.callbacks.remove(self._tell)
        gc.unfreeze()

    def _tell(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        elif self._start:
            took = time.perf_counter() - self._start
            self.total_s += took
            self.longest_s = max(self.longest_s, took)

    def as_json(self) -> dict[str, float]:
        return {"gc_s": self.total_s, "gc_longest_s": self.longest_s}
