"""What NVML tells of the GPUs: facts that change numbers, and power while a run goes on.

Whatever is not there - the library, the driver, the permission, a single query of a GPU that does
not know it - is None, and never an error: power is beside the point of a run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.bench.record import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLE_S = 0.1


@contextlib.contextmanager
def nvml(count: int = 1) -> Iterator[tuple[Any, list[Any]] | None]:
    """NVML's module and the handles of the first `count` visible GPUs; None without."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no driver, no permission, no library: there is no NVML
        yield None
        return
    try:
        handles = [_handle(pynvml, name) for name in _visible(pynvml)[: max(count, 1)]]
        found = [handle for handle in handles if handle is not None]
        yield (pynvml, found) if found else None
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _visible(lib: Any) -> list[str]:
    """Indices or UUIDs, in CUDA's order. An empty or negative entry hides all that follow."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        count = _ask(lambda: lib.nvmlDeviceGetCount())
        return [str(i) for i in range(count or 0)]
    names: list[str] = []
    for part in text.split(","):
        name = part.strip()
        if not name or name.startswith("-"):
            break
        names.append(name)
    return names


def _handle(lib: Any, name: str) -> Any:
    if name.isdigit():
        return _ask(lambda: lib.nvmlDeviceGetHandleByIndex(int(name)))
    return _ask(lambda: lib.nvmlDeviceGetHandleByUUID(name))


def _ask(call: Callable[[], Any]) -> Any:
    """The answer, or None: a query may be missing in the library, the driver or the GPU."""
    try:
        value = call()
    except Exception:  # noqa: BLE001 - NVML's errors, and AttributeError of an older binding
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def gpu_facts() -> dict[str, Any] | None:
    """Of the first visible GPU."""
    with nvml() as found:
        if found is None:
            return None
        lib, (gpu, *_) = found
        limit = _ask(lambda: lib.nvmlDeviceGetEnforcedPowerLimit(gpu))
        mig = _ask(lambda: lib.nvmlDeviceGetMigMode(gpu))
        persistence = _ask(lambda: lib.nvmlDeviceGetPersistenceMode(gpu))
        return {
            "name": _ask(lambda: lib.nvmlDeviceGetName(gpu)),
            "driver": _ask(lambda: lib.nvmlSystemGetDriverVersion()),
            "cuda": _ask(lambda: lib.nvmlSystemGetCudaDriverVersion()),
            "power_cap_w": limit / 1000 if limit else None,
            "sm_clock_mhz": _ask(lambda: lib.nvmlDeviceGetClockInfo(gpu, lib.NVML_CLOCK_SM)),
            "max_sm_clock_mhz": _ask(lambda: lib.nvmlDeviceGetMaxClockInfo(gpu, lib.NVML_CLOCK_SM)),
            "memory_clock_mhz": _ask(lambda: lib.nvmlDeviceGetClockInfo(gpu, lib.NVML_CLOCK_MEM)),
            "throttle_reasons": _ask(lambda: lib.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
            "temperature_c": _ask(
                lambda: lib.nvmlDeviceGetTemperature(gpu, lib.NVML_TEMPERATURE_GPU)
            ),
            "persistence": None if persistence is None else bool(persistence),
            "mig": bool(mig[0]) if isinstance(mig, list | tuple) and mig else None,
        }


def read(lib: Any, handles: list[Any]) -> dict[str, float]:
    """Power, energy and use of all handles together; what is not told is left out."""
    queries: dict[str, Callable[[Any], Any]] = {
        "power_w": lambda h: lib.nvmlDeviceGetPowerUsage(h) / 1000,
        "energy_j": lambda h: lib.nvmlDeviceGetTotalEnergyConsumption(h) / 1000,
        "gpu_busy": lambda h: lib.nvmlDeviceGetUtilizationRates(h).gpu / len(handles),
    }
    values: dict[str, float] = {}
    for name, query in queries.items():
        each = [_ask(functools.partial(query, handle)) for handle in handles]
        if all(v is not None for v in each):
            values[name] = sum(each)
    return values


@dataclass(slots=True)
class Sampler:
    """Reads the GPUs from a thread of its own while the block runs: a query may take milliseconds.

    `take()` hands out what has come since the last call.
    """

    count: int = 1
    _samples: list[dict[str, float]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        with nvml(self.count) as found:
            while found is not None:
                values = read(*found)
                if not values:
                    return
                self._samples.append({"t_ns": now_ns(), **values})
                if self._stop.wait(SAMPLE_S):
                    return

    def take(self) -> list[dict[str, float]]:
        taken = self._samples[:]
        del self._samples[: len(taken)]
        return taken
