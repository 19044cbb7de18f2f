"""Find the fastest way of every product of a decode step on this machine's GPU, beside cuBLAS.

    python -m benchmarks.kernels.tune --attention --seconds 200 --write nvcli/kernels/tuned.json

For each product of a layer and each number of rows the candidates (`candidates.py`) are compiled,
side by side; checked against float32, on inputs of their own; and timed in a CUDA graph with the
norm beside them, over the weights of many layers. Our kernel is taken where it is ahead by more
than noise. With `--attention`, how decode attention cuts its keys and the tiles of prefill are
tried too; with `--attention only`, nothing else.

Prints what was found as it is found, then the table with it, and appends a row a shape to
`benchmarks/results/kernels.jsonl`. What there was no time for is named, and keeps its entries.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine.workloads import SHAPES
from benchmarks.kernels.table import ROWS, package_table, table_text, winners, with_kernels
from benchmarks.kernels.tune_products import (
    DTYPE,
    Measured,
    Place,
    compile_all,
    measure,
    metrics_of,
    places,
)
from benchmarks.rows import write_row
from benchmarks.stopwatch import elapsed_s, say
from nvcli.kernels import tuned

if TYPE_CHECKING:
    from collections.abc import Callable

ROTATED_BYTES = 1 << 30  # several times the L2 cache
MIN_LAYERS = 3


def tune_products(
    models: list[str], rows: list[int], is_time_left: Callable[[], bool], device: torch.device
) -> list[dict[str, Any]]:
    """Entries of the table."""
    all_places = [(model, place) for model in models for place in places(model)]
    wanted = [
        (place, n, cut) for _, place in all_places for n in rows for cut in place.candidates(n)
    ]
    say(f"{len(wanted)} candidates; {compile_all(wanted, device, say)} kernels compiled")
    entries: list[dict[str, Any]] = []
    for model, place in all_places:
        if not is_time_left():
            say(f"no time for {model} {place.name}")
            continue
        num_layers = min(SHAPES[model].layers, max(MIN_LAYERS, ROTATED_BYTES // place.num_bytes))
        weights = [
            torch.randn(place.weight_shape, device=device, dtype=DTYPE) / place.size**0.5
            for _ in range(num_layers)
        ]
        measured: dict[int, Measured] = {}
        for n in rows:
            if not is_time_left():
                say(f"no time for {model} {place.name} of {n} rows and more")
                break
            measured[n] = measure(place, n, weights, say)
            show(model, place, n, measured[n])
        entries += winners(place, measured)
        shape = {"product": place.name, "op": place.op, "weight": place.weight_shape}
        config = {"what": "products in tiles", "model": model, **shape, "layers": num_layers}
        metrics = metrics_of(place, measured)
        write_row("kernels", metrics=metrics, config=config | {"dtype": "bfloat16"}, peer="cuBLAS")
    return entries


def show(model: str, place: Place, rows: int, result: Measured) -> None:
    best = [f"{us:.2f} {cut}" for us, cut in result.tried[:2]]
    library = f"cuBLAS {result.library_us:.2f}, floor {place.floor_us:.2f}"
    say(" | ".join([f"{model} {place.name} x{rows}: {library}", *best]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-8b", help=", ".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="some of these")
    parser.add_argument(
        "--attention",
        nargs="?",
        const="too",
        choices=("too", "only"),
        help="how attention is cut, too, or that only",
    )
    parser.add_argument("--seconds", type=float, default=200, help="nothing begins after so many")
    parser.add_argument("--write", type=Path, help="where the table goes; printed in any case")
    parser.add_argument("--list", action="store_true", help="say what would be tried; needs no GPU")
    args = parser.parse_args()
    models, rows = args.models.split(","), [int(n) for n in args.rows.split(",")]
    unknown = [m for m in models if m not in SHAPES] + [n for n in rows if n not in ROWS]
    if unknown:
        parser.error(f"unknown: {unknown}")
    if args.list:
        for model in models:
            for place in places(model):
                for n in rows:
                    for cut in place.candidates(n):
                        print(model, place.name, n, cut)
        return
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device; --list does not")
    device = torch.device("cuda", 0)

    def is_time_left() -> bool:
        return elapsed_s() < args.seconds

    attention = None
    with torch.inference_mode():
        found = []
        if args.attention != "only":
            found = tune_products(models, rows, is_time_left, device)
        if args.attention:
            from benchmarks.kernels.tune_attention import tune_attention

            attention = tune_attention(is_time_left, say)
    table = with_kernels(package_table(), tuned.gpu_of(device), found, attention)
    text = table_text(table)
    print(text)
    if args.write:
        args.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
