"""Rotary position embedding: the cos/sin table, with YaRN and llama3 scaling.

NeoX style: dimension i pairs with i + D/2. Frequencies are computed exactly as transformers does
(float32, `modeling_rope_utils.py` of 5.24), because at position 100,000 a last-bit difference in a
frequency is a visible angle. The table is float32 and covers the whole context, so a step only
gathers its rows, once for all layers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[D / 2] float32 on the CPU: radians per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents  # in positions, over 2 pi
    plain = 1.0 / wavelengths
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, plain, 1.0 / (rope.factor * wavelengths))
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    return plain


def _yarn(rope: RopeConfig, head_dim: int, plain: Tensor, stretched: Tensor) -> Tensor:
    """Blend by wavelength: short waves stay, long ones stretch by the factor, a ramp between.

    Source: YaRN, https://arxiv.org/abs/2309.00071, section 3.2.
    """

    def dimension(rotations: float) -> float:  # which pair turns that often over the context
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    keep = 1 - torch.clamp((index - low) / (high - low), 0, 1)
    return stretched * (1 - keep) + plain * keep


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's rule: stretch the waves longer than the trained context, blend the middle."""
    wavelengths = 2 * math.pi / plain
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelengths > longest, plain / rope.factor, plain)
    is_medium = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(is_medium, blended, scaled)


class RotaryEmbedding(nn.Module):
    """cos_sin: [max_positions, 2, D] float32; row p holds cos and the signed sin of position p.

    cos repeats the D / 2 values twice; sin is negative in the first half, so that rotating is
    `x * cos + swap_halves(x) * sin` (see `kernels.reference.rope_norm`). That holds for every type
    of scaling, bit by bit, and `kernels.rope_norm_store` reads only one half of each. A step's rows
    are looked up with those of the embedding: `kernels.look_up`.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, *, device: torch.device
    ) -> None:
        super().__init__()
        frequencies = inverse_frequencies(rope, head_dim)
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = (positions[:, None] * frequencies).to(device)  # [max_positions, D / 2]
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", table, persistent=False)
