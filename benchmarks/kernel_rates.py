"""What our kernels reached on an H200, beside their floors: the table of docs/kernels.md.

Everything is read from the rows of `kernels.jsonl`. Of each kernel the last row that has it counts,
so a figure is of the kernel as it was at that commit. Floors are bytes at the bandwidth, or
operations at the rate, of `benchmarks.engine.workloads`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nvcli
from benchmarks.engine.workloads import FLOPS, READ_BYTES_PER_S, SHAPES
from benchmarks.rows import RESULTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    Row = dict[str, Any]

TUNED = Path(nvcli.__file__).with_name("kernels") / "tuned.json"
SMALL = SHAPES["qwen3-0.6b"]  # of all but the products
KEY_BYTES = 4 * SMALL.kv_heads * SMALL.head_dim  # of a key and its value, in 16 bits
NUM_PRODUCTS = 4 * SMALL.layers
# Decode attention: rows x keys, as the sweep names them, with how many rows are cut alike.
DECODE = {"1x4096": 8, "8x1024": 8, "32x1024": 32, "64x1024": 64, "128x400": 128}
DECODE |= {"59x1360+-460": 64, "103x1160+-460": 128, "218x750+-460": 256, "256x1024+-896": 256}
PREFILL = ("8x2048", "1x16384")
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
        us = f"{self.us:,.0f}" if self.us >= 1000 else f"{self.us:.3g}"
        peer = "" if self.peer_us is None else f"{self.peer_us:.3g}"
        return (
            f"| {self.kernel} | {self.shape} | {us} | {rate:,.0f} {unit} "
            f"| {per_second / floor:.0%} | {peer} | {self.commit} |"
        )


def table() -> str:
    rows = kernel_rows()
    rates = [*decode(rows), *prefill(rows), *one_row(rows), *products(rows), *small(rows)]
    head = "| kernel | shape | us | rate | of the floor | cuBLAS, us | commit |"
    return "\n".join([head, "|---|---|--:|--:|--:|--:|---|", *(rate.line() for rate in rates)])


def kernel_rows() -> list[Row]:
    lines = (RESULTS / "kernels.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def last_with(rows: list[Row], metric: str) -> Row:
    return next(row for row in reversed(rows) if metric in row["metrics"])


def decode(rows: list[Row]) -> Iterator[Rate]:
    """Each shape with the cut that the table of the package has for it."""
    table = json.loads(TUNED.read_text(encoding="utf-8"))["sm_90"]
    splits: list[tuple[int, dict[str, int]]] = table["attention"]["splits"]
    for shape, limit in DECODE.items():
        metric = f"decode, {limit} rows, 2 warps, 3 stages"
        row = last_with(rows, metric)
        size, _, spread = shape.partition("+-")
        num_rows, keys = map(int, size.split("x"))
        cut = next(cut for most, cut in splits if num_rows <= most)
        programs = cut["uneven" if spread else "even"]
        us = dict(map(tuple, row["metrics"][metric]))[programs][shape]
        name = f"{num_rows} x {keys:,} keys" + f", give or take {spread}" * bool(spread)
        yield Rate("decode attention", name, us, num_rows * keys * KEY_BYTES, row["commit"])


def prefill(rows: list[Row]) -> Iterator[Rate]:
    row = last_with(rows, "prefill")
    (usual, times), *_ = row["metrics"]["prefill"]
    assert not usual, "the first are the settings that the package had"
    for shape in PREFILL:
        count, n = map(int, shape.split("x"))
        operations = 2 * count * n * n * SMALL.heads * SMALL.head_dim
        name, us = f"{count} x {n:,} tokens", times[shape]
        yield Rate("prefill attention", name, us, operations, row["commit"], is_bytes=False)


def one_row(rows: list[Row]) -> Iterator[Rate]:
    row = last_with(rows, "products_1")
    found = row["metrics"]["products_1"]
    us, peer_us = (found[name]["us"] / NUM_PRODUCTS for name in ("ours", "cublas"))
    work, shape = 2 * SMALL.body_params / NUM_PRODUCTS, "1 row, 0.6B, mean of a layer's"
    yield Rate("product, norm, SwiGLU", shape, us, work, row["commit"], peer_us=peer_us)


def products(rows: list[Row]) -> Iterator[Rate]:
    """Of some dozens of rows, by whoever was the fastest there."""
    of_tiles = [row for row in rows if row["config"].get("what") == "products in tiles"]
    last = {(row["config"]["model"], row["config"]["product"]): row for row in of_tiles}
    for (model, product), row in last.items():
        outputs, columns = row["config"]["weight"]
        for num_rows in PRODUCT_ROWS:
            found = row["metrics"][num_rows]
            shape = f"{num_rows} rows, {model.removeprefix('qwen3-').upper()} {product}"
            work, peer_us = 2 * outputs * columns, found["library_us"]
            yield Rate("product", shape, found["us"], work, row["commit"], peer_us=peer_us)


def small(rows: list[Row]) -> Iterator[Rate]:
    row = last_with(rows, "small_256")
    found, num_rows = row["metrics"]["small_256"], 256
    heads = SMALL.heads + 2 * SMALL.kv_heads
    elements = {
        "add_rms_norm": ("add and RMSNorm", 4 * SMALL.hidden),
        "silu_and_mul": ("SwiGLU", 3 * SMALL.inner),
        "rotary_store": ("q/k norm, rotary, store", (2 * heads + 4) * SMALL.head_dim),
        "sample_greedy": ("sampling, greedy", SMALL.vocab),
        "sample_random": ("sampling, random", SMALL.vocab),
        "sample_top_20": ("sampling, top-k and top-p", SMALL.vocab),
    }
    for metric, (name, count) in elements.items():
        yield Rate(name, f"{num_rows} rows", found[metric], 2 * num_rows * count, row["commit"])
