"""A device whose steps take what those of an H200 do, by a law that is not the physical model's.

Products get faster with rows, attention reads faster the more keys there are and not by a formula
(microseconds a layer, between them a line), a captured step computes its whole bucket, and a step
beyond the buckets is launched kernel by kernel. Times are near to what `docs/log.md` tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvcli.bench.perf_model import Cost, PerfModel
from nvcli.bench.shape import Shape
from nvcli.engine.buckets import Buckets

if TYPE_CHECKING:
    from nvcli.bench.record import StepRecord

SLOTS, BUDGET = 256, 16_384
KEYS = (0, 4_100, 16_500, 34_700, 66_000, 80_000, 151_000, 264_000, 400_000, 800_000)
ATTENTION_US = (4, 14, 32, 58, 88, 97, 147, 257, 389, 778)
LONE_KEYS, LONE_US = (0, 128, 1024, 4096, 16_384), (2, 3, 7, 12, 34)
BANDWIDTH, PROMPT_ATTENTION = 4.2e12, 380e12


@dataclass(frozen=True)
class GpuLike:
    shape: Shape
    flops: float  # of products with 2,048 rows and more

    @property
    def buckets(self) -> Buckets:
        return Buckets.of(SLOTS, BUDGET, self.shape.num_params)

    @property
    def model(self) -> PerfModel:
        """What is known of it before anything is measured."""
        nothing = Cost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return PerfModel(self.shape, nothing, BUDGET, depth=1, buckets=self.buckets)

    def host_s(self, step: StepRecord) -> float:
        """Launching."""
        is_captured = self.buckets.padded(step.b, step.p) is not None
        return 0.12e-3 if is_captured else 0.25e-3 * self.shape.layers

    def step_s(self, step: StepRecord) -> float:
        shape, layers = self.shape, self.shape.layers
        padded = self.buckets.padded(step.b, step.p)
        tokens, rows = padded or (step.b + step.p, step.heads)
        if (step.b, step.p) == (1, 0):
            attention = float(np.interp(step.S, LONE_KEYS, LONE_US)) * 1e-6
            return layers * (10e-6 + attention) + shape.bytes_per_step / BANDWIDTH
        speed = self.flops * (0.7 + 0.3 * min(tokens, 2048) / 2048)
        flops = 2 * tokens * shape.p_lin + 2 * rows * shape.p_head
        products = max(shape.bytes_per_step / BANDWIDTH, flops / speed)
        attention = layers * float(np.interp(step.S, KEYS, ATTENTION_US)) * 1e-6
        if not step.p:
            return products + attention + 14e-6 * layers
        prompts = step.pairs * shape.attention_flops / PROMPT_ATTENTION
        between = (34e-6 if padded else 42e-6) * layers
        return products + prompts + between + 1.12 * attention * (step.b > 0)


SMALL = GpuLike(Shape(1024, 28, 16, 8, 128, 3072, 151_936, True), 520e12)  # Qwen3-0.6B
LARGE = GpuLike(Shape(4096, 36, 32, 8, 128, 12_288, 151_936, False), 700e12)  # Qwen3-8B
