"""Rotary embedding in a checkpoint's configuration: base, scaling, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nvcli.models.json_file import JsonFile

RopeType = Literal["default", "yarn", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base, scaling type and the numbers of that type."""

    theta: float = 10_000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position: int = 0  # context the model was trained on, before scaling
    attention_factor: float = 1.0  # multiplies cos and sin (YaRN)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # round YaRN's correction range to whole dimensions
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3


def read_rope(raw: JsonFile, max_position_embeddings: int) -> RopeConfig:
    """RoPE from transformers 5's `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    Defaults follow transformers 5.24 `modeling_rope_utils.py`.
    """
    key = "rope_scaling" if raw.data.get("rope_scaling") else "rope_parameters"
    rope = raw.data.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise raw.error(f"{key} must be one flat object, the same for every layer")

    def number(name: str, default: float | None = None) -> float:
        return raw.number_in(rope, name, f"{key}.{name}", default)

    theta = number("rope_theta", raw.number("rope_theta", 10_000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", raw.data.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise raw.error(f"partial_rotary_factor {partial!r} is not supported")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type not in ("yarn", "llama3"):
        raise raw.error(f"RoPE type {rope_type!r} is not supported, only default, yarn and llama3")
    original = raw.data.get("original_max_position_embeddings")
    if original is None:
        original = rope.get("original_max_position_embeddings", max_position_embeddings)
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        raise raw.error(
            f"original_max_position_embeddings must be a positive whole number, got {original!r}"
        )
    if rope_type == "llama3":
        return RopeConfig(
            theta=theta,
            rope_type="llama3",
            factor=number("factor"),
            original_max_position=original,
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    if "factor" in rope and rope["factor"] is None:
        factor = max_position_embeddings / original
    else:
        factor = number("factor")
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise raw.error(f"{key}.truncate must be true or false, got {truncate!r}")
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=number("attention_factor", _yarn_attention_factor(factor, rope)),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=truncate,
    )


def _yarn_attention_factor(factor: float, rope: dict[str, Any]) -> float:
    """0.1 * ln(factor) + 1 (YaRN paper, section 3.4); DeepSeek's mscale pair where it is given."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(float(mscale)) / scale(float(mscale_all_dim))
    return scale(1.0)
