"""ModelConfig: a checkpoint's configuration reduced to the typed numbers the engine uses.

`ModelConfig.from_hf(folder)` reads `config.json` and, where there is one, `generation_config.json`.
Whatever the engine cannot compute faithfully is refused here, by name and in one line, before a
byte of weights is read: a scaling that is silently ignored would only show as worse text.

Torch-free, so that the command line can describe a model without loading the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, cast

from nvcli.errors import ModelNotFoundError, UnsupportedModelError, UsageError
from nvcli.models.fp8_config import read_fp8
from nvcli.models.json_file import JsonFile
from nvcli.models.moe_config import MoeConfig, read_moe
from nvcli.models.rope_config import RopeConfig, read_rope
from nvcli.types import FP8_BLOCK

CheckpointDType = Literal["float32", "float16", "bfloat16"]


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
    dtype: CheckpointDType = "float32"  # of what is not fp8
    is_fp8: bool = False  # the layers' weights are float8_e4m3fn with a scale a block
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    @property
    def max_model_len(self) -> int:
        """Longest context the checkpoint allows, in tokens; YaRN reaches original * factor."""
        if self.rope.rope_type != "yarn":
            return self.max_position_embeddings
        scaled = int(self.rope.original_max_position * self.rope.factor)
        return max(self.max_position_embeddings, scaled)

    def model_len(self, requested: int | None) -> int:
        """The limit of one sequence: `requested`, or all that the checkpoint allows. Raises
        `UsageError` when `requested` is beyond that."""
        limit = self.max_model_len
        if requested is not None and requested > limit:
            raise UsageError(
                f"--max-model-len {requested} is more than the model's {limit} positions",
                hint=f"Use --max-model-len {limit} or less.",
                param="max_model_len",
            )
        return limit if requested is None else requested

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token takes in the KV cache, all layers: 2 * L * Hk * D."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def least_params(self) -> int:
        """All weights but norms, biases and a head of its own, and the table of positions."""
        idle = self.moe.num_experts - self.moe.num_experts_per_tok if self.moe else 0
        found = self.linear_params + idle * self.expert_params + self.vocab_size * self.hidden_size
        return found + self.max_model_len * self.head_dim

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
        problem = self._sharing_problem(size)
        if problem is None:
            return
        fitting = [n for n in range(1, self.num_heads + 1) if self._sharing_problem(n) is None]
        raise UsageError(
            f"--tensor-parallel-size {size}: {problem}",
            hint=f"It can be {', '.join(map(str, fitting))}.",
            param="tensor_parallel_size",
        )

    def _sharing_problem(self, size: int) -> str | None:
        if size == 1:
            return None
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % size or (kv_heads % size and size % kv_heads):
            return f"the model's {heads} heads and {kv_heads} KV heads cannot be shared equally"
        inner = {"MLP": self.intermediate_size}
        if self.moe is not None:
            inner = inner if self.num_moe_layers < self.num_layers else {}
            inner["experts"] = self.moe.intermediate_size
        for name, width in inner.items():
            if width % size:
                return f"the model's {name} of {width} cannot be shared equally"
        shares = [heads // size * self.head_dim, max(1, kv_heads // size) * self.head_dim]
        shares += [width // size for width in inner.values()]
        cut = [share for share in shares if share % FP8_BLOCK]
        if self.is_fp8 and cut:
            return f"a rank's share of {cut[0]} would cut the fp8 weights' blocks of {FP8_BLOCK}"
        return None

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
        raw = JsonFile(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = JsonFile(generation_path) if generation_path.is_file() else None

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
        intermediate_size = raw.count("intermediate_size")
        sizes = (hidden_size, num_heads * head_dim, num_kv_heads * head_dim, intermediate_size)
        return cls(
            architecture=architecture,
            hidden_size=hidden_size,
            num_layers=raw.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=intermediate_size,
            vocab_size=vocab_size,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
            has_qk_norm=family.has_qk_norm,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=family.has_mlp_bias and raw.flag("mlp_bias"),
            tie_word_embeddings=raw.flag("tie_word_embeddings"),
            moe=read_moe(raw) if family.has_experts else None,
            rope=read_rope(raw, max_position_embeddings),
            dtype=_dtype(raw),
            is_fp8=read_fp8(raw, sizes, has_experts=family.has_experts),
            eos_token_ids=_eos_token_ids(vocab_size, raw, generation),
            sampling_defaults=_sampling_defaults(generation),
        )


def _architecture(raw: JsonFile) -> str:
    names = raw.data.get("architectures")
    if not isinstance(names, list) or not names:
        raise raw.error("architectures is missing")
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return name
    raise UnsupportedModelError(
        f"architecture {names[0]} is not supported", hint=f"Supported: {', '.join(FAMILIES)}."
    )


def _refuse_unsupported(raw: JsonFile) -> None:
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


def _dtype(raw: JsonFile) -> CheckpointDType:
    name = raw.data.get("dtype") or raw.data.get("torch_dtype") or "float32"
    short = name.removeprefix("torch.") if isinstance(name, str) else name
    if short not in ("float32", "float16", "bfloat16"):
        raise raw.error(f"dtype {name!r} is not supported, only float32, float16 and bfloat16")
    return cast(CheckpointDType, short)


def _eos_token_ids(vocab_size: int, *sources: JsonFile | None) -> tuple[int, ...]:
    """The union, in order. Ids outside the vocabulary can never be sampled and are left out."""
    ids = [i for source in sources if source for i in source.token_ids("eos_token_id")]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def _sampling_defaults(generation: JsonFile | None) -> dict[str, float]:
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
