"""What our kernels reached on an H200, beside their floors: the table of docs/kernels.md.

Everything is read from the rows of `kernels.jsonl`. Of each kernel the last row that has it counts,
so a figure is of the kernel as it was at that commit. Floors are bytes at the bandwidth, or
operations at the rate, of `benchmarks.engine.workloads`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.engine.workloads import FLOPS, READ_BYTES_PER_S, SHAPES
from benchmarks.rows import RESULTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    Row = dict[str, Any]

SMALL = SHAPES["qwen3-0.6b"]  # of all but products and experts
# Of the metrics of `benchmarks.kernels.bandwidth`: rows x keys, give or take so many.
DECODE = (
    *("1x4096", "8x1024", "32x1024", "64x1024", "256x1024"),
    *("24x1500+-460", "59x1360+-460", "103x1160+-460", "218x750+-460", "256x590+-460"),
)
DECODE_FP8 = ("1x4096", "32x1024", "131x800", "256x1024")
SHARED = ("16x2048+300", "256x2048+96", "8x32768+500")
PREFILL = ("8x2048", "1x16384")
FP8_MODELS = ("qwen3-0.6b-fp8", "qwen3-8b-fp8")
EXPERTS = {"1": True, "8": True, "64": True, "2048": False, "16384": False}  # rows: bytes decide
PRODUCT_ROWS = ("8", "32")


@dataclass(frozen=True, slots=True)
class Rate:
    """work: bytes, or operations where it is a product of many rows."""

    kernel: str
    shape: str
    us: float
    work: float
    commit: str
    is_bytes: bool = True
    peer_us: float | None = None  # of cuBLAS

    def line(self) -> str:
        per_second = self.work / (self.us * 1e-6)
        floor, unit = (READ_BYTES_PER_S, "GB/s") if self.is_bytes else (FLOPS, "TFLOP/s")
        rate = per_second / (1e9 if self.is_bytes else 1e12)
        peer = "" if self.peer_us is None else _us(self.peer_us)
        return (
            f"| {self.kernel} | {self.shape} | {_us(self.us)} | {rate:,.0f} {unit} "
            f"| {per_second / floor:.0%} | {peer} | {self.commit} |"
        )


def _us(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.3g}"


def table() -> str:
    rows = kernel_rows()
    rates = [
        *(*decode(rows), *shared(rows), *prefill(rows), *one_row(rows), *products(rows)),
        *(*fp8_products(rows), *experts(rows), *small(rows)),
    ]
    head = "| kernel | shape | us | rate | of the floor | cuBLAS, us | commit |"
    return "\n".join([head, "|---|---|--:|--:|--:|--:|---|", *(rate.line() for rate in rates)])


def kernel_rows() -> list[Row]:
    lines = (RESULTS / "kernels.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def last(rows: list[Row], metric: str) -> tuple[Any, str]:
    """What was measured last under that name, and at which commit."""
    row = next(row for row in reversed(rows) if metric in row["metrics"])
    return row["metrics"][metric], row["commit"]


def rate_of(
    kernel: str, shape: str, found: dict[str, float], commit: str, *, is_bytes: bool = True
) -> Rate:
    """found: us, and gb_s or tflop_s"""
    per_second = found["gb_s"] * 1e9 if is_bytes else found["tflop_s"] * 1e12
    return Rate(kernel, shape, found["us"], per_second * found["us"] * 1e-6, commit, is_bytes)


def decode(rows: list[Row]) -> Iterator[Rate]:
    named = [("decode attention", "decode_", shape) for shape in DECODE]
    named += [("decode attention, fp8 cache", "decode_fp8_", shape) for shape in DECODE_FP8]
    for kernel, prefix, shape in named:
        size, _, spread = shape.partition("+-")
        num_rows, keys = map(int, size.split("x"))
        name = f"{num_rows} x {keys:,} keys" + f", give or take {spread}" * bool(spread)
        yield rate_of(kernel, name, *last(rows, prefix + shape))


def shared(rows: list[Row]) -> Iterator[Rate]:
    """Keys that all rows share are counted once."""
    for shape in SHARED:
        size, _, own = shape.partition("+")
        num_rows, prefix = map(int, size.split("x"))
        found, commit = last(rows, f"shared_{shape}")
        name = f"{num_rows} x {own} keys behind {prefix:,} shared"
        yield rate_of("shared and decode attention", name, found["once"], commit)


def prefill(rows: list[Row]) -> Iterator[Rate]:
    for shape in PREFILL:
        count, n = map(int, shape.split("x"))
        found, commit = last(rows, f"prefill_{shape}")
        yield rate_of("prefill attention", f"{count} x {n:,} tokens", found, commit, is_bytes=False)


def one_row(rows: list[Row]) -> Iterator[Rate]:
    found, commit = last(rows, "products_1")
    num_products = 4 * found["layers"]
    us, peer_us = (found[name]["us"] / num_products for name in ("ours", "cublas"))
    work, shape = 2 * SMALL.body_params / SMALL.layers / 4, "1 row, 0.6B, mean of a layer's"
    yield Rate("product, norm, SwiGLU", shape, us, work, commit, peer_us=peer_us)


def products(rows: list[Row]) -> Iterator[Rate]:
    """Of some dozens of rows, by whoever was the fastest there."""
    of_tiles = [row for row in rows if row["config"].get("what") == "products in tiles"]
    latest = {(row["config"]["model"], row["config"]["product"]): row for row in of_tiles}
    for (model, product), row in latest.items():
        outputs, columns = row["config"]["weight"]
        for num_rows in PRODUCT_ROWS:
            found = row["metrics"][num_rows]
            shape = f"{num_rows} rows, {model.removeprefix('qwen3-').upper()} {product}"
            work, peer_us = 2 * outputs * columns, found["library_us"]
            yield Rate("product", shape, found["us"], work, row["commit"], peer_us=peer_us)


def fp8_products(rows: list[Row]) -> Iterator[Rate]:
    """The four of a layer; cuBLAS has dense copies of the weights, made each time."""
    for model in FP8_MODELS:
        name = model.removeprefix("qwen3-").removesuffix("-fp8").upper()
        for num_rows in ("1", *PRODUCT_ROWS):
            found, commit = last(rows, f"products_{num_rows}_{model}")
            layers, ours = found["layers"], found["ours"]
            shape = f"{num_rows} row{'s' * (num_rows != '1')}, {name}, a layer's four"
            us, peer_us = ours["us"] / layers, found["cublas"]["us"] / layers
            work = ours["gb_s"] * 1e9 * us * 1e-6
            yield Rate("products, fp8 weights", shape, us, work, commit, peer_us=peer_us)


def experts(rows: list[Row]) -> Iterator[Rate]:
    for num_rows, is_bytes in EXPERTS.items():
        shape = f"{int(num_rows):,} row{'s' * (num_rows != '1')}, a layer of 30B-A3B"
        found, commit = last(rows, f"experts_{num_rows}")
        yield rate_of("router and experts", shape, found, commit, is_bytes=is_bytes)


def small(rows: list[Row]) -> Iterator[Rate]:
    found, commit = last(rows, "small_256")
    num_rows = 256
    heads = SMALL.heads + 2 * SMALL.kv_heads
    swiglu, store = 3 * SMALL.inner, (2 * heads + 4) * SMALL.head_dim
    elements = {
        "look_up": ("embedding and rotary rows", 2 * SMALL.hidden + 8 * SMALL.head_dim),
        "add_rms_norm": ("add and RMSNorm", 4 * SMALL.hidden),
        "silu_and_mul": ("SwiGLU", swiglu),
        "silu_and_mul_late": ("late norm, SwiGLU", swiglu + SMALL.hidden),
        "rotary_store": ("q/k norm, rotary, store", store),
        "rotary_store_late": ("late norm, q/k norm, rotary, store", store + SMALL.hidden),
        "sample_greedy": ("sampling, greedy", SMALL.vocab),
        "sample_random": ("sampling, random", SMALL.vocab),
        "sample_top_20": ("sampling, top-k and top-p", SMALL.vocab),
        "sample_top_p": ("sampling, top-p", SMALL.vocab),
        "sample_penalties": ("sampling, penalties", 3 * SMALL.vocab),
    }
    for metric, (name, count) in elements.items():
        yield Rate(name, f"{num_rows} rows", found[metric], 2 * num_rows * count, commit)
    yield rate_of("gathering of keys and values", "16,384 keys", *last(rows, "gather_16384"))
