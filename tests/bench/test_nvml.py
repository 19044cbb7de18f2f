"""NVML as a GPU would have it, and in all the ways in which it may not be there."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from nvcli.bench import nvml
from nvcli.bench.record import Run
from nvcli.bench.server_side import counter_rate
from nvcli.bench.summary import summarize
from tests.bench.runs import HEADER, MS, closed_loop
from tests.waiting import until


class NVMLError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """Two GPUs of 300 and 500 W; `broken` names the queries that fail."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        super().__init__(NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0)
        self.broken = broken
        self.is_open = False
        self.start = time.monotonic()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            raise NVMLError(name)
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise NVMLError("invalid index")
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-a": 0, "GPU-b": 1}[name]

    def nvmlDeviceGetName(self, gpu: int) -> bytes:
        return b"NVIDIA H200"  # older bindings give bytes

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.0"

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:
        return 700_000

    def nvmlDeviceGetMigMode(self, gpu: int) -> list[int]:
        return [0, 0]

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        return 1980

    nvmlDeviceGetMaxClockInfo = nvmlDeviceGetClockInfo

    def nvmlDeviceGetPersistenceMode(self, gpu: int) -> int:
        return 1

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 300_000 + 200_000 * gpu

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        return int((time.monotonic() - self.start) * 1e6)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=80 + 10 * gpu)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    lib = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", lib)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lib


def test_facts(fake: FakeNvml) -> None:
    facts = nvml.gpu_facts()
    assert facts is not None
    assert (facts["name"], facts["power_cap_w"], facts["mig"]) == ("NVIDIA H200", 700.0, False)
    assert facts["persistence"] is True
    assert facts["temperature_c"] is None  # this binding has no such query
    assert not fake.is_open


@pytest.mark.parametrize(
    ("visible", "handles"),
    [
        ("1", [1]),
        ("GPU-b,GPU-a", [1, 0]),
        ("0,-1,1", [0]),
        (" 1 , 0 ", [1, 0]),
        ("7,0", [0]),
        ("GPU-x", None),
        ("", None),
        ("-1", None),
    ],
)
def test_handles_follow_what_cuda_sees(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, handles: list[int] | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with nvml.nvml(2) as found:
        assert (found[1] if found is not None else None) == handles
    assert not fake.is_open


def test_one_reading_adds_up_all_gpus(fake: FakeNvml) -> None:
    values = nvml.read(fake, [0, 1])
    assert values["power_w"] == 800
    assert values["gpu_busy"] == 85
    fake.broken = ("nvmlDeviceGetPowerUsage",)
    assert set(nvml.read(fake, [0, 1])) == {"energy_j", "gpu_busy"}


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_without_it_there_is_nothing(fake: FakeNvml, broken: str) -> None:
    fake.broken = (broken,)
    assert nvml.gpu_facts() is None
    with nvml.Sampler() as sampler:
        time.sleep(0.02)
    assert sampler.take() == []


def test_sampler_reads_beside_the_run(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "SAMPLE_S", 0.01)
    samples: list[dict[str, float]] = []
    with nvml.Sampler(count=2) as sampler:
        until(lambda: samples.extend(sampler.take()) or len(samples) >= 2, "two samples")
    sampler.take()
    assert {s["power_w"] for s in samples} == {800.0}
    assert sampler.take() == []
    assert not fake.is_open


def test_counter_rate() -> None:
    """100 J at 1 s, 700 J at 3 s: 300 W. What lies outside does not count."""
    samples = [(0, 0.0), (1000 * MS, 100.0), (2000 * MS, 650.0), (3000 * MS, 700.0)]
    assert counter_rate(samples, 500 * MS, 3500 * MS) == pytest.approx(300)
    assert counter_rate(samples[:1], 0, 10**12) is None
    assert counter_rate([(0, 5.0), (1000 * MS, 5.0)], 0, 10**12) is None


@pytest.mark.parametrize("counter", [True, False])
def test_joule_per_token(counter: bool) -> None:
    """4 clients, 50 ms a request, 4 tokens: 320 tok/s; 640 W make 2 J a token."""
    gauges: list[dict[str, Any]] = []
    for i in range(100):
        energy = {"energy_j": 640 * 0.05 * i} if counter else {}
        gauges.append({"t_ns": i * 50 * MS, "power_w": 640.0, **energy})
    run = Run(HEADER, requests=closed_loop(), gauges=gauges, end={"interrupted": False})
    found = summarize(run).json["energy"]
    assert found["joule_per_token"] == pytest.approx(2.0, rel=0.01)
    assert found["source"] == ("energy counter" if counter else "power samples")
    assert found["busy"] is None
