"""What the lines of a stored run must be made of, so that a report can be computed from them.

A file that was edited, or written by another program, is told with the name of what is wrong in it
and never ends in an arithmetic error. What a run may lack is None or absent.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvcli.bench.record import RequestRecord, StepRecord

MOST_TOKENS = 10**8  # of a chunk or an answer
LARGEST = 2**62  # number that can be computed with; nanoseconds, of either sign
_RESOURCES = ("num_blocks", "block_size", "slots", "handles", "backlog")
_HEADER: dict[str, Any] = {
    "id": str,
    "command": str,
    "created": str,
    "slots": int,
    "until_ci": float,
    "slo": dict.fromkeys(("ttft", "tpot", "e2e", "stall"), float),
    "model": {
        **dict.fromkeys(("name", "dtype", "weights_dtype"), str),
        **dict.fromkeys(("max_model_len", "num_blocks", "block_size"), int),
    },
    "load": {
        **dict.fromkeys(("mode", "text", "arrival"), str),
        **dict.fromkeys(("concurrency", "cap"), int),
        **dict.fromkeys(("rate", "arrival_cv"), float),
    },
    "workload": {
        **dict.fromkeys(("hash", "text", "prefix", "cache"), str),
        **dict.fromkeys(("seed", "turns"), int),
    },
    "environment": {
        **dict.fromkeys(("device", "nvcli", "governor"), str),
        "cpus": int,
        "load_average": float,
        "gpu": {
            "driver": str,
            **dict.fromkeys(("power_cap_w", "sm_clock_mhz", "max_sm_clock_mhz"), float),
        },
        "versions": {},
    },
    "client": dict.fromkeys(("ceiling_requests_per_s", "cpu_s_per_token"), float),
    "clock": {"name": str, "resolution_ns": float},
    "resources": dict.fromkeys(_RESOURCES, int),
    "server": {},
}
_END = dict.fromkeys(("client_cpu_s", "wall_s", "gc_s", "gc_longest_s"), float) | {"planned": int}
_POINT = {
    "name": str,
    "predictor": str,
    **dict.fromkeys(("tokens", "floor_s", "predicted_s"), float),
}


def header(value: dict[str, Any]) -> None:
    """Raises `ValueError` naming the field, as the functions below do."""
    _fields(value, _HEADER)
    if (warmup := value.get("warmup", "auto")) != "auto":
        _one(warmup, float, "warmup")
    resources = value.get("resources")
    if resources and (None in map(resources.get, _RESOURCES) or not resources["block_size"]):
        raise ValueError("resources lacks a field")
    if odd := set(value.get("slo") or ()) - set(_HEADER["slo"]):
        raise ValueError(f"slo has {odd.pop()!r}")
    clock = value.get("clock")
    if clock and any(clock.get(name) is None for name in _HEADER["clock"]):
        raise ValueError("clock lacks a field")
    if value.get("perf_model") is not None:
        _perf_model(value["perf_model"])


def _perf_model(value: dict[str, Any]) -> None:
    from nvcli.bench.perf_model import PerfModel

    try:
        model, hardware = PerfModel.from_json(value)
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"perf_model: {exc}") from exc
    _one(model.depth, int, "perf_model.depth")
    for part in (model.shape, model.cost, hardware):
        for f in fields(part):
            found = getattr(part, f.name)
            if f.name == "seen":
                for row in found:
                    if len(row) != 4:
                        raise ValueError("perf_model.seen has rows of four")
                    for number in row:
                        _one(number, float, "perf_model.seen")
            elif f.name in ("name", "source"):
                if not isinstance(found, str):
                    raise ValueError(f"perf_model.{f.name} is no text")
            elif found is not None or f.default is not None:
                _one(found + 0, float, f"perf_model.{f.name}")  # a flag is a number here
    _one(model.budget, int, "perf_model.budget")
    rest = model.shape
    if not (model.budget and hardware.bandwidth and hardware.flops) or (
        rest.moe_layers and not (rest.experts and rest.experts_per_token)
    ):
        raise ValueError("perf_model divides by nothing")


def request(record: RequestRecord) -> None:
    for name in ("s_star_ns", "s_ns", "end_ns"):
        _moment(getattr(record, name), name)
    for t_ns, k in record.chunks:
        _moment(t_ns, "chunks")
        tokens(k, "chunks")
    for name in ("n_in", "n_out", "cached"):
        if (value := getattr(record, name)) is not None:
            tokens(value, name)
    if record.conn_ns is not None:
        _moment(record.conn_ns, "conn_ns")
    _one(record.turn, int, "turn")
    if not isinstance(record.lost, bool):
        raise ValueError("lost is neither true nor false")
    _one(record.error, str, "error")
    _one(record.server, dict, "server")
    for name, value in record.server.items():
        _moment(value, f"server.{name}")


def step(record: StepRecord) -> None:
    _moment(record.t_ns, "t_ns")
    _finite(record.dt_s, "dt_s")
    for name in record.__slots__:
        if name not in ("t_ns", "dt_s"):
            _one(getattr(record, name), int, name)


def gauge(value: dict[str, Any]) -> None:
    _moment(value["t_ns"], "t_ns")
    for name, sample in value.items():
        if name != "t_ns":
            _finite(sample, name)


def point(value: dict[str, Any]) -> None:
    _fields(value, _POINT)
    if value["name"] is None:
        raise ValueError("name is None")
    times = value.get("t_s", [])
    if not isinstance(times, list):
        raise ValueError("t_s is no list")
    for time in times:
        _one(time, float, "t_s")


def end(value: dict[str, Any]) -> None:
    _fields(value, _END)


def _fields(value: dict[str, Any], kinds: dict[str, Any], place: str = "") -> None:
    for name, kind in kinds.items():
        found = value.get(name)
        if found is None:
            continue
        if isinstance(kind, dict):
            _one(found, dict, place + name)
            _fields(found, kind, f"{place}{name}.")
        else:
            _one(found, kind, place + name)


def _one(value: object, kind: type, name: str) -> None:
    """float: a number, not negative and of a size that can be computed with; int: a whole one."""
    if kind in (float, int):
        if not _is_number(value, kind, 0):
            raise ValueError(f"{name} is no {'whole ' if kind is int else ''}number")
    elif value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} is of another kind")


def tokens(value: object, name: str) -> int:
    """A number of tokens as it was told."""
    _one(value, int, name)
    assert isinstance(value, int), "it was checked"
    if value > MOST_TOKENS:  # a sample a token would fill the memory
        raise ValueError(f"{name} is more than {MOST_TOKENS:,}")
    return value


def _finite(value: object, name: str) -> None:
    """A number of either sign: what a server or a clock told, odd as it may be."""
    if not _is_number(value, float, 1 - LARGEST):
        raise ValueError(f"{name} is no number")


def _moment(value: object, name: str) -> None:
    if not _is_number(value, int, 1 - LARGEST):
        raise ValueError(f"{name} is no moment in whole nanoseconds")


def _is_number(value: object, kind: type, least: int) -> bool:
    kinds = int if kind is int else int | float
    return isinstance(value, kinds) and not isinstance(value, bool) and least <= value < LARGEST
