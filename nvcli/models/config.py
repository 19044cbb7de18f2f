"""ModelConfig: a checkpoint's configuration reduced to the typed numbers the engine uses.

`ModelConfig.from_hf(folder)` reads `config.json` and, where there is one, `generation_config.json`.
Whatever the engine cannot compute faithfully is refused here, by name and in one line, before a
byte of weights is read: a scaling that is silently ignored would only show as worse text.

Torch-free, so that the command line can describe a model without loading the engine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast

from nvcli.errors import ModelError, ModelNotFoundError, UnsupportedModelError, UsageError

CheckpointDType = Literal["float32", "float16", "bfloat16"]
RopeType = Literal["default", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes in code rather than in its configuration."""

    has_qk_norm: bool = False
    head_dim: int | None = None  # when the configuration gives none; None: hidden / heads
    qkv_bias: bool | None = None  # None: as `attention_bias` says, for q, k, v and the output
    has_mlp_bias: bool = False  # whether `mlp_bias` is read
    has_experts: bool = False


FAMILIES = {
    "Qwen3ForCausalLM": Family(has_qk_norm=True, head_dim=128),
    "Qwen3MoeForCausalLM": Family(has_qk_norm=True, has_experts=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "LlamaForCausalLM": Family(has_mlp_bias=True),
}

# generation_config.json key -> SamplingParams field
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Experts in place of the MLP: how many, of what size, and in which layers."""

    num_experts: int  # X
    num_experts_per_tok: int  # K, which a token goes to
    intermediate_size: int  # F of one expert
    norm_topk_prob: bool = False  # whether a token's K weights are made to add up to 1
    decoder_sparse_step: int = 1  # every n-th layer has experts
    mlp_only_layers: tuple[int, ...] = ()  # these have an MLP all the same

    def has_experts(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def num_hit(self, num_tokens: float) -> float:
        """Experts of a layer that so many tokens go to: see `num_hit`."""
        return num_hit(self.num_experts, self.num_experts_per_tok, num_tokens)


def num_hit(num_experts: int, per_token: int, num_tokens: float) -> float:
    """Distinct experts of so many tokens, in the mean of uniform routing: X (1 - (1 - K / X)^T)."""
    return num_experts * (1 - math.pow(1 - per_token / num_experts, num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Numbers of one decoder. Raises `ModelError` from `from_hf` only."""

    architecture: str
    hidden_size: int  # E
    num_layers: int  # L
    num_heads: int  # Hq
    num_kv_heads: int  # Hk
    head_dim: int  # D, not always E / Hq
    intermediate_size: int  # F, of layers without experts
    vocab_size: int  # V, often padded beyond the tokenizer's length
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    has_qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    moe: MoeConfig | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)
    dtype: CheckpointDType = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    @property
    def max_model_len(self) -> int:
        """Longest context the checkpoint allows, in tokens; YaRN reaches original * factor."""
        if self.rope.rope_type != "yarn":
            return self.max_position_embeddings
        scaled = int(self.rope.original_max_position * self.rope.factor)
        return max(self.max_position_embeddings, scaled)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token takes in the KV cache, all layers: 2 * L * Hk * D."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_moe_layers(self) -> int:
        return sum(self.moe.has_experts(i) for i in range(self.num_layers)) if self.moe else 0

    @property
    def expert_params(self) -> int:
        """Weights of one expert of every layer that has experts."""
        size = self.moe.intermediate_size if self.moe else 0
        return 3 * self.num_moe_layers * self.hidden_size * size

    @property
    def linear_params(self) -> int:
        """Weights of the layers' products that one token passes through: attention, MLP or router
        and K experts.
        """
        attention = 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlps = 3 * (self.num_layers - self.num_moe_layers) * self.intermediate_size
        found = self.hidden_size * (self.num_layers * attention + mlps)
        if self.moe is not None:
            found += self.num_moe_layers * self.hidden_size * self.moe.num_experts
            found += self.moe.num_experts_per_tok * self.expert_params
        return found

    def linear_params_read(self, num_tokens: float) -> float:
        """The same for a step of so many tokens, each weight once."""
        if self.moe is None:
            return self.linear_params
        more = self.moe.num_hit(num_tokens) - self.moe.num_experts_per_tok
        return self.linear_params + more * self.expert_params

    def check_tensor_parallel(self, size: int) -> None:
        """Raises `UsageError` where the model cannot be shared by so many ranks."""
        if size == 1:
            return
        heads, kv_heads = self.num_heads, self.num_kv_heads
        inner = {"MLP": self.intermediate_size}
        if self.moe is not None:
            inner = inner if self.num_moe_layers < self.num_layers else {}
            inner["experts"] = self.moe.intermediate_size
        uneven = [f"{name} of {width}" for name, width in inner.items() if width % size]
        if heads % size or (kv_heads % size and size % kv_heads):
            problem = f"the model's {heads} heads and {kv_heads} KV heads"
        elif uneven:
            problem = f"the model's {uneven[0]}"
        else:
            return
        fitting = [
            n
            for n in range(1, heads + 1)
            if not (heads % n or (kv_heads % n and n % kv_heads))
            and not any(width % n for width in inner.values())
        ]
        raise UsageError(
            f"--tensor-parallel-size {size}: {problem} cannot be shared equally",
            hint=f"It can be {', '.join(map(str, fitting))}.",
            param="tensor_parallel_size",
        )

    @classmethod
    def from_hf(cls, folder: str | Path) -> Self:
        """Read a checkpoint folder in Hugging Face's layout.

        Raises `ModelNotFoundError` when the folder or its config.json is missing,
        `UnsupportedModelError` when the engine cannot run it, `ModelError` for a broken file.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelNotFoundError(f"there is no folder {folder}")
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(
                f"{folder} has no config.json",
                hint="Name the folder that holds config.json and the safetensors files.",
            )
        raw = _Json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = _Json(generation_path) if generation_path.is_file() else None

        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        _refuse_unsupported(raw)

        hidden_size = raw.count("hidden_size")
        num_heads = raw.count("num_attention_heads")
        num_kv_heads = raw.count("num_key_value_heads", num_heads)
        head_dim = raw.count("head_dim", family.head_dim or hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise raw.error(f"{num_heads} heads cannot share {num_kv_heads} KV heads")
        if head_dim % 2:
            raise raw.error(f"head_dim must be even for RoPE, got {head_dim}")
        max_position_embeddings = raw.count("max_position_embeddings")
        vocab_size = raw.count("vocab_size")
        attention_bias = raw.flag("attention_bias")
        return cls(
            architecture=architecture,
            hidden_size=hidden_size,
            num_layers=raw.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=raw.count("intermediate_size"),
            vocab_size=vocab_size,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
            has_qk_norm=family.has_qk_norm,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=family.has_mlp_bias and raw.flag("mlp_bias"),
            tie_word_embeddings=raw.flag("tie_word_embeddings"),
            moe=_moe(raw) if family.has_experts else None,
            rope=_rope(raw, max_position_embeddings),
            dtype=_dtype(raw),
            eos_token_ids=_eos_token_ids(vocab_size, raw, generation),
            bos_token_id=next(iter(raw.token_ids("bos_token_id")), None),
            sampling_defaults=_sampling_defaults(generation),
        )


class _Json:
    """One JSON object on disk, read with types checked; errors name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as err:  # bad JSON and bad UTF-8 alike
            raise ModelError(f"{path} is not valid JSON: {err}") from err
        except OSError as err:
            raise ModelError(f"{path} cannot be read: {err.strerror}") from err
        if not isinstance(data, dict):
            raise ModelError(f"{path} is not a JSON object")
        self.data: dict[str, Any] = data

    def error(self, message: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {message}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} must be a positive whole number, got {value!r}")
        return value

    def flag(self, key: str) -> bool:
        value = self.data.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self.number_in(self.data, key, key, default)

    def number_in(
        self, data: dict[str, Any], key: str, name: str, default: float | None = None
    ) -> float:
        value = data.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(f"{name} must be a positive number, got {value!r}")
        return float(value)

    def token_ids(self, key: str) -> list[int]:
        value = self.data.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.error(f"{key} must be a token id or a list of them, got {value!r}")
        return values


def _architecture(raw: _Json) -> str:
    names = raw.data.get("architectures")
    if not isinstance(names, list) or not names:
        raise raw.error("architectures is missing")
    for name in names:
        if name in FAMILIES:
            return cast(str, name)
    raise UnsupportedModelError(
        f"architecture {names[0]} is not supported", hint=f"Supported: {', '.join(FAMILIES)}."
    )


def _refuse_unsupported(raw: _Json) -> None:
    quantization = raw.data.get("quantization_config") or raw.data.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise raw.error(f"quantization_config ({method or 'unnamed'}) is not supported yet")
    activation = raw.data.get("hidden_act", "silu")
    if activation != "silu":
        raise raw.error(f"hidden_act {activation!r} is not supported, only silu")
    windows = raw.data.get("layer_types") or []
    if raw.flag("use_sliding_window") and raw.data.get("sliding_window") is not None:
        first = raw.data.get("max_window_layers", 28)  # layers from here on use the window
        if not windows and isinstance(first, int) and first < raw.count("num_hidden_layers"):
            windows = ["sliding_attention"]
    if any(kind != "full_attention" for kind in windows):
        raise raw.error("sliding window attention is not supported")


def _moe(raw: _Json) -> MoeConfig:
    """Names and rules of transformers' `Qwen3MoeConfig`; its version 5 writes `num_experts` as
    `num_local_experts`.
    """
    key = "num_experts" if raw.data.get("num_experts") is not None else "num_local_experts"
    num_experts, per_token = raw.count(key), raw.count("num_experts_per_tok")
    if per_token > num_experts:
        raise raw.error(f"num_experts_per_tok {per_token} is more than {key} {num_experts}")
    dense, num_layers = raw.data.get("mlp_only_layers") or [], raw.count("num_hidden_layers")
    if not isinstance(dense, list) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < num_layers for i in dense
    ):
        raise raw.error(f"mlp_only_layers must be a list of layers' numbers, got {dense!r}")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        intermediate_size=raw.count("moe_intermediate_size"),
        norm_topk_prob=raw.flag("norm_topk_prob"),
        decoder_sparse_step=raw.count("decoder_sparse_step", 1),
        mlp_only_layers=tuple(dense),
    )


def _rope(raw: _Json, max_position_embeddings: int) -> RopeConfig:
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


def _dtype(raw: _Json) -> CheckpointDType:
    name = raw.data.get("dtype") or raw.data.get("torch_dtype") or "float32"
    short = name.removeprefix("torch.") if isinstance(name, str) else name
    if short not in ("float32", "float16", "bfloat16"):
        raise raw.error(f"dtype {name!r} is not supported, only float32, float16 and bfloat16")
    return cast(CheckpointDType, short)


def _eos_token_ids(vocab_size: int, *sources: _Json | None) -> tuple[int, ...]:
    """The union, in order. Ids outside the vocabulary can never be sampled and are left out."""
    ids = [i for source in sources if source for i in source.token_ids("eos_token_id")]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def _sampling_defaults(generation: _Json | None) -> dict[str, float]:
    """SamplingParams fields that generation_config.json sets; `do_sample: false` means greedy."""
    if generation is None:
        return {}
    defaults: dict[str, float] = {}
    for key in _SAMPLING_KEYS:
        value = generation.data.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise generation.error(f"{key} must be a number of at least 0, got {value!r}")
        defaults[key] = value
    if generation.data.get("do_sample") is False:
        defaults["temperature"] = 0
    return defaults
