"""Find the fastest of cuBLAS's algorithms for the products of a layer that are the library's.

    python -m benchmarks.kernels.tune_library --seconds 200 --write nvcli/kernels/tuned.json

cuBLAS offers a handful for each number of rows, by guess. Here all of those are timed at each of
`ROWS`, in a CUDA graph over weights that no cache holds, and the best of them once more as in a
step, in turns with what the library does by itself. One that is ahead by more than noise becomes
an entry of the table, for its rows and those below it down to the next number; beyond `EAGER_ROWS`
it has to be ahead at both ends, since there any number of rows occurs.

Prints what was found as it is found, then the table with it, and appends a row a shape to
`benchmarks/results/kernels.jsonl`.
"""

from __future__ import annotations

import argparse
import os
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine.workloads import SHAPES
from benchmarks.kernels.table import Shape, package_table, table_text, with_algorithms
from benchmarks.kernels.tune_products import DTYPE, Place, places
from benchmarks.rows import write_row
from benchmarks.stopwatch import elapsed_s, say
from nvcli.engine.buckets import decode_buckets
from nvcli.kernels import cublaslt, library, tuned
from nvcli.kernels.cublaslt import Algorithm, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

FEWEST = 24  # below, our own kernels take products
EAGER_ROWS = 512
ROWS = (
    *(rows for rows in decode_buckets(256) if rows >= FEWEST),
    *(384, 512, 1024, 2048, 4096, 8192, 12288, 16384),
)
OFFERED_MANY = (384, 512, 768, 1024, 1536, 2048, 4096, 8192, 12288, 16384)
NOISE = 0.012
NEAR = 1.006
MOST_WRONG = 5e-3  # a product of bfloat16, rounded once, is off by some 2e-3
ROTATED_BYTES = 100 << 20
FINALISTS = 6
TURNS = 3
STEP_S, EAGER_S = 3e-3, 12e-3  # that one measurement takes
TRAFFIC_BYTES = 96 << 20
MOST_GUESSES = 64
PREFERENCE_WORKSPACE, PREFERENCE_REDUCTIONS = 1, 3  # cublasLtMatmulPreferenceAttributes_t
ANY_REDUCTION, NO_REDUCTION = 0xF, 0
Graph = torch.cuda.CUDAGraph


def guesses(problem: Problem) -> Iterator[Algorithm]:
    """What cuBLAS offers for it, the likeliest first, with and without splits of the columns."""
    results = (cublaslt.Heuristic * MOST_GUESSES)()
    for reductions in (ANY_REDUCTION, NO_REDUCTION):
        preference, number = c_void_p(), c_int()
        cublaslt.call("cublasLtMatmulPreferenceCreate", byref(preference))
        for attribute, value in (
            (PREFERENCE_REDUCTIONS, c_uint32(reductions)),
            (PREFERENCE_WORKSPACE, c_uint64(cublaslt.MAX_WORKSPACE)),
        ):
            size = c_size_t(sizeof(value))
            cublaslt.call(
                *("cublasLtMatmulPreferenceSetAttribute", preference, attribute),
                *(byref(value), size),
            )
        cublaslt.call(
            *("cublasLtMatmulAlgoGetHeuristic", problem.handle, cublaslt.operation()),
            *(*problem.layouts, preference, MOST_GUESSES, results, byref(number)),
        )
        cublaslt.call("cublasLtMatmulPreferenceDestroy", preference)
        for result in results[: number.value]:
            if result.state == 0:
                yield cublaslt.configuration(result.algo)


def offered(place: Place, rows: Iterable[int], device: torch.device) -> list[Algorithm]:
    """For these numbers of rows together: cuBLAS's guess for one is often the best for another."""
    shape = (place.weight_shape[0], place.size)
    return list(
        dict.fromkeys(
            algorithm for n in rows for algorithm in guesses(Problem(device.index or 0, n, *shape))
        )
    )


class Bench:
    """A product of so many rows with each of the weights."""

    def __init__(self, place: Place, rows: int, weights: list[Tensor]) -> None:
        device = weights[0].device
        self.is_eager = rows >= EAGER_ROWS
        self.weights = weights[:2] if self.is_eager else weights
        self.x = torch.randn(rows, place.size, device=device, dtype=DTYPE)
        self.y = torch.randn(rows, weights[0].shape[0], device=device, dtype=DTYPE)
        self.adds = place.op == "addends"
        self.problem = Problem(device.index or 0, rows, weights[0].shape[0], place.size)
        # Graphs move it, so it has to live as long.
        size = 0 if self.is_eager else TRAFFIC_BYTES
        self.traffic = torch.empty(2, size, dtype=torch.uint8, device=device)

    def multiply(self, weight: Tensor, algorithm: Algorithm | None) -> None:
        """By that algorithm, or as the library chooses."""
        if algorithm is not None:
            prepared = self.problem.prepare(algorithm)
            assert prepared is not None, "it was accepted"
            self.problem.run(prepared, self.x, weight, self.y, adds=self.adds)
        elif self.adds:
            library.add_linear(self.x, weight, self.y)
        else:
            library.linear(self.x, weight, self.y)

    def alone(self, algorithm: Algorithm | None) -> Callable[[], None]:
        def body() -> None:
            for weight in self.weights:
                self.multiply(weight, algorithm)

        return body

    def in_a_step(self, algorithm: Algorithm | None, *, has_product: bool = True) -> Graph:
        """Of few rows, with as many bytes moved between two products as attention reads: beside
        that the clock is lower, which some algorithms mind more than others.
        """

        def body() -> None:
            for weight in self.weights:
                if not self.is_eager:
                    self.traffic[0].copy_(self.traffic[1])
                if has_product:
                    self.multiply(weight, algorithm)

        return captured(body)

    def us(self, graph: Graph, least_s: float = 0.0) -> float:
        """Of one product, over as many replays as take so long."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replays, spent = 1, 0.0
        while True:
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            spent = float(start.elapsed_time(end)) * 1e-3
            if spent >= 0.8 * least_s:
                return 1e6 * spent / replays / len(self.weights)
            replays = max(replays + 1, int(replays * least_s / spent))

    def error(self, algorithm: Algorithm) -> float:
        """Relative, against float32, of the last rows."""
        prepared = self.problem.prepare(algorithm)
        assert prepared is not None, "it was accepted"
        y = torch.zeros_like(self.y)
        self.problem.run(prepared, self.x, self.weights[0], y, adds=False)
        exact = self.x[-256:].float() @ self.weights[0].float().t()
        return float((y[-256:].float() - exact).norm() / exact.norm())


def captured(body: Callable[[], None]) -> Graph:
    body()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    return graph


def rival(bench: Bench, algorithms: list[Algorithm]) -> tuple[float, list[tuple[float, Algorithm]]]:
    """us of the library by itself, and of the best algorithms, the fastest first: of those that are
    the fastest alone, how long they take in a step, in turns.
    """
    alone: list[tuple[float, Algorithm]] = []
    for algorithm in algorithms:
        if bench.problem.prepare(algorithm) is not None:
            graph = captured(bench.alone(algorithm))
            alone.append((min(bench.us(graph) for _ in range(2)), algorithm))
    finalists = [algorithm for _, algorithm in sorted(alone)[:FINALISTS]]
    graphs = {key: bench.in_a_step(key) for key in (None, *finalists)}
    between = None if bench.is_eager else bench.in_a_step(None, has_product=False)
    times: dict[Algorithm | None, list[float]] = {key: [] for key in graphs}
    least_s = EAGER_S if bench.is_eager else STEP_S
    for _ in range(TURNS):
        other_us = 0.0 if between is None else bench.us(between, least_s)
        for key, graph in graphs.items():
            times[key].append(bench.us(graph, least_s) - other_us)
    ranked = sorted((median(times[key]), key) for key in times if key is not None)
    return median(times[None]), ranked


def entries(place: Place, weights: list[Tensor]) -> list[dict[str, Any]]:
    """Of one place in the layer, where the product is the library's."""
    device = weights[0].device
    few, many = (offered(place, rows, device) for rows in (range(16, 385, 8), OFFERED_MANY))
    say(f"{place.name} {place.weight_shape}: {len(few)} and {len(many)} algorithms")
    found: list[dict[str, Any]] = []
    lowest = FEWEST - 7
    for rows in ROWS:
        entry = None
        if not is_own(place, rows, device):
            last = found[-1] if found and found[-1]["rows"][1] + 1 == lowest else None
            entry = best_entry(place, rows, lowest, weights, few if rows <= 256 else many, last)
        lowest = rows + 1
        if entry is None:
            continue
        if last is not None and last["algorithm"] == entry["algorithm"]:
            last |= {k: entry[k] for k in ("us", "library_us")}
            last["rows"] = [last["rows"][0], rows]
        else:
            found.append(entry)
    return found


def is_own(place: Place, rows: int, device: torch.device) -> bool:
    """Whether a kernel of ours takes the product."""
    if place.op == "addends" and rows >= tuned.late_norm_rows(place.num_outputs):
        return False  # it is added to the residual, which is always the library's
    return tuned.choose(place.op, rows, place.size, place.num_outputs, device, DTYPE) is not None


def best_entry(
    place: Place,
    rows: int,
    lowest: int,
    weights: list[Tensor],
    algorithms: list[Algorithm],
    last: dict[str, Any] | None,
) -> dict[str, Any] | None:
    """For `lowest` to `rows` rows; that of fewer rows where it is as good."""
    bench = Bench(place, rows, weights)
    library_us, ranked = rival(bench, algorithms)
    say(f"  {place.name} x{rows}: library {library_us:.2f}, best {ranked[:1]}")
    good = [(us, a) for us, a in ranked if us < (1 - NOISE) * library_us]
    if good and rows > EAGER_ROWS:
        lower_us, lower = rival(Bench(place, lowest + 127, weights), [a for _, a in good[:6]])
        fine = {a for us, a in lower if us < lower_us}
        good = [(us, a) for us, a in good if a in fine]
    if not good:
        return None
    near = [(us, a) for us, a in good if us < NEAR * good[0][0]]
    us, algorithm = next((n for n in near if last and list(n[1]) == last["algorithm"]), good[0])
    wrong = bench.error(algorithm)
    if wrong > MOST_WRONG:
        say(f"WRONG: {place.name} x{rows} {algorithm}: {wrong:.2g}")
        return None
    return {
        "columns": place.size,
        "outputs": weights[0].shape[0],
        "adds": bench.adds,
        "rows": [lowest, rows],
        "algorithm": list(algorithm),
        "us": round(us, 2),
        "library_us": round(library_us, 2),
    }


def without_algorithms() -> None:
    """What they are compared with is the library's own choice."""
    table = package_table()
    for part in table.values():
        part.pop("library", None)
    with NamedTemporaryFile("w", suffix=".json") as file:
        file.write(table_text(table))
        file.flush()
        os.environ["NVCLI_TUNED"] = file.name
        tuned.forget()
        tuned.attention(torch.device("cuda", 0))  # reads it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    usual = "qwen3-0.6b,qwen3-8b,qwen3-14b"
    parser.add_argument("--models", default=usual, help=", ".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=200, help="nothing begins after so many")
    parser.add_argument("--write", type=Path, help="put what was found into this table")
    options = parser.parse_args()
    unknown = set(models := options.models.split(",")) - set(SHAPES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device")
    device = torch.device("cuda", 0)
    torch.mm(*(torch.ones(16, 16, device=device, dtype=DTYPE) for _ in range(2)))
    version = cublaslt.version()
    if version is None:
        parser.error("cublasLt cannot be called here")
    without_algorithms()
    shapes = {
        (place.op == "addends", place.weight_shape): place
        for model in models
        for place in places(model)
    }
    say(f"cublasLt {version}, {len(shapes)} shapes")
    found: dict[Shape, list[dict[str, Any]]] = {}
    with torch.inference_mode():
        for place in shapes.values():
            if elapsed_s() > options.seconds:
                say(f"no time for {place.name} {place.weight_shape}: it keeps its entries")
                continue
            number = max(2, min(12, ROTATED_BYTES // place.num_bytes + 1))
            weights = [
                torch.randn(place.weight_shape, device=device, dtype=DTYPE) / place.size**0.5
                for _ in range(number)
            ]
            new = entries(place, weights)
            found[place.size, place.weight_shape[0], place.op == "addends"] = new
            write_row(
                "kernels",
                metrics={"entries": new},
                config={"kernel": "cublaslt", "place": place.name, "shape": place.weight_shape},
                prints=False,
            )
    text = table_text(with_algorithms(package_table(), tuned.gpu_of(device), version, found))
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
