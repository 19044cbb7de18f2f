"""The products of a layer: each candidate compiled, checked and timed in its place, beside cuBLAS.

A product hides part of its time under its neighbours and leaves part of its work to them, so it is
timed with the norm that stands before or behind it, over the weights of many layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine.workloads import READ_BYTES_PER_S, SHAPES
from benchmarks.kernels import candidates
from benchmarks.kernels.bandwidth import seconds_in_graph
from nvcli import kernels
from nvcli.kernels import cuts, gemm, reference, skinny
from nvcli.kernels.compiling import compiled_only, load

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Cut = cuts.Tiles | cuts.Skinny | None  # None: the library
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Place:
    """A product in a layer."""

    name: str
    op: str
    size: int
    num_outputs: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.num_outputs * (1 + (self.op == "swiglu")), self.size

    @property
    def num_bytes(self) -> int:
        return 2 * self.weight_shape[0] * self.size

    @property
    def floor_us(self) -> float:
        return self.num_bytes / READ_BYTES_PER_S * 1e6

    def candidates(self, rows: int) -> list[cuts.Tiles | cuts.Skinny]:
        return candidates.products(self.op, rows, self.size, self.num_outputs)

    def run(self, x: Tensor, weight: Tensor, cut: Cut) -> Tensor:
        """As `nvcli.kernels` would with this choice."""
        if isinstance(cut, cuts.Tiles):
            if self.op == "swiglu":
                return gemm.swiglu(x, weight, cut)
            if cut.splits > 1:
                return gemm.linear_addends(x, weight, cut)
            return gemm.linear(x, weight, None, tiles=cut)
        if isinstance(cut, cuts.Skinny):
            is_swiglu = self.op == "swiglu"
            return (skinny.swiglu if is_swiglu else skinny.linear)(x, weight, cut)
        y = torch.mm(x, weight.t())
        return kernels.silu_and_mul(y) if self.op == "swiglu" else y

    def exact(self, x: Tensor, weight: Tensor) -> Tensor:
        y = x.float() @ weight.float().t()
        return reference.silu_and_mul(y) if self.op == "swiglu" else y


def places(model: str) -> list[Place]:
    """The products of a layer, in order, those of experts aside; and the head."""
    shape = SHAPES[model]
    heads = shape.head_dim * shape.heads
    found = [
        Place("qkv", "linear", shape.hidden, heads + 2 * shape.head_dim * shape.kv_heads),
        Place("o", "addends", heads, shape.hidden),
    ]
    if shape.moe is None:
        found.append(Place("gate_up", "swiglu", shape.hidden, shape.inner))
        found.append(Place("down", "addends", shape.inner, shape.hidden))
    return [*found, Place("head", "linear", shape.hidden, shape.vocab)]


def compile_all(
    wanted: list[tuple[Place, int, Cut]], device: torch.device, say: Callable[[str], None]
) -> int:
    """Every variant once, and the norms that add up; one that cannot be loaded is said here, and
    fails again where it is measured. -> how many
    """

    def load_or_say(kernel: Any) -> None:
        try:
            load(kernel)
        except Exception as error:  # noqa: BLE001 - the others are worth measuring
            say(f"cannot be loaded: {error!r:.120}")

    with compiled_only(device, load_or_say) as found:
        for place, rows, cut in wanted:
            chain(place, rows, [torch.empty(place.weight_shape, device=device, dtype=DTYPE)], cut)()
    return len(found)


def error_of(place: Place, rows: int, weight: Tensor, cut: Cut, seed: int) -> float:
    """Relative, against float32, on an input that no other call has had."""
    generator = torch.Generator(weight.device).manual_seed(seed)
    x = torch.randn(rows, place.size, device=weight.device, dtype=DTYPE, generator=generator)
    exact, got = place.exact(x, weight), place.run(x, weight, cut)
    got = (got.sum(0) if got.dim() == 3 else got).float()
    return float((got - exact).norm() / exact.norm())


def chain(place: Place, rows: int, weights: list[Tensor], cut: Cut) -> Callable[[], None]:
    """The product with each of the weights, and the norm beside each."""
    device = weights[0].device
    x = torch.randn(rows, place.size, device=device, dtype=DTYPE)
    width = place.num_outputs if place.op == "addends" else place.size
    residual = torch.randn(rows, width, device=device, dtype=DTYPE)
    norm = torch.ones(width, device=device, dtype=DTYPE)

    def body() -> None:
        total = residual
        for weight in weights:
            if place.op == "addends":
                _, total = kernels.add_rms_norm(place.run(x, weight, cut), total, norm, 1e-6)
            else:
                normed, total = kernels.add_rms_norm(x, total, norm, 1e-6)
                place.run(normed, weight, cut)

    return body


@dataclass(frozen=True, slots=True)
class Measured:
    """us of the library, and of each candidate that is right, the fastest first."""

    library_us: float
    tried: list[tuple[float, cuts.Tiles | cuts.Skinny]]


def measure(place: Place, rows: int, weights: list[Tensor], say: Callable[[str], None]) -> Measured:
    def time_of(cut: Cut) -> float:
        return seconds_in_graph(chain(place, rows, weights, cut)) / len(weights) * 1e6

    library_error = error_of(place, rows, weights[-1], None, seed=rows)
    library_us = time_of(None)
    tried = []
    for i, cut in enumerate(place.candidates(rows)):
        try:
            error = error_of(place, rows, weights[-1], cut, seed=1000 * rows + i)
            if not error <= 2 * library_error:
                say(f"WRONG: {place.name} x{rows} {cut}: {error:.2g}, library {library_error:.2g}")
                continue
            tried.append((time_of(cut), cut))
        except Exception as error:  # noqa: BLE001 - the others are worth measuring
            say(f"failed: {place.name} x{rows} {cut}: {error!r:.120}")
    return Measured(library_us, sorted(tried, key=lambda found: found[0]))


def metrics_of(place: Place, measured: dict[int, Measured]) -> dict[str, Any]:
    """By rows: us, GB/s and share of the floor of the best, cuBLAS's us, and all that was tried."""
    metrics: dict[str, Any] = {"floor_us": round(place.floor_us, 2)}
    for rows, result in measured.items():
        best = min([result.library_us, *(us for us, _ in result.tried)])
        metrics[str(rows)] = {
            "us": round(best, 2),
            "gb_s": round(place.num_bytes / best / 1e3),
            "share_of_floor": round(place.floor_us / best, 3),
            "library_us": round(result.library_us, 2),
            "tried": [
                [round(us, 2), type(cut).__name__, *asdict(cut).values()]
                for us, cut in result.tried
            ],
        }
    return metrics
