"""What an engine is built from: one frozen dataclass, every field with a default and a reason.

The command line, `LLM(...)` and tests all build an `EngineConfig`; nothing else configures the
engine. Where None is the default, the value follows from the model or the device when it is loaded.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from nvcli.errors import UsageError, meant
from nvcli.types import MAX_INT, MAX_SEED

DeviceName = Literal["auto", "cuda", "cpu"]
DTypeName = Literal["auto", "float32", "float16", "bfloat16"]
KVCacheDTypeName = Literal["auto", "float32", "float16", "bfloat16", "fp8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
AttentionBackendName = Literal["auto", "torch", "triton", "fa2", "fa3"]

DEFAULT_MODEL = "demo"  # the small checkpoint that ships with the package
DEFAULT_BLOCK_SIZE = 16
# Where nothing else is asked for, by the kind of device.
MAX_NUM_SEQS = {"cuda": 256, "cpu": 16}
MAX_NUM_BATCHED_TOKENS = {"cuda": 16_384, "cpu": 1_024}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which model to run, where, and how; each field is explained below it.

    Checks itself when it is made, as far as that goes without the model: a value of the wrong kind
    or out of range raises `UsageError`, which names the field.
    """

    model: str = DEFAULT_MODEL
    """A local folder, a Hugging Face id, or `demo` for the built-in model."""
    device: DeviceName = "auto"
    """Where to run; `auto` takes CUDA when a device is there."""
    dtype: DTypeName = "auto"
    """Weights and activations; `auto`: float32 on the CPU, 16 bits as in the checkpoint on CUDA."""
    kv_cache_dtype: KVCacheDTypeName = "auto"
    """Keys and values in the cache; `auto` follows `dtype`, `fp8` is float8_e4m3fn."""
    load_format: LoadFormat = "auto"
    """`auto` reads safetensors; `dummy` fills random weights, for speed work without a download."""
    max_model_len: int | None = None
    """Prompt plus output limit of one sequence, in tokens; None: what the checkpoint allows."""
    memory_utilization: float | None = None
    """Share of memory for weights and KV cache: of the GPU's total (default 0.9), or of what the
    machine has available (default 0.5) on the CPU."""
    num_blocks: int | None = None
    """KV-cache blocks; None: as many as `memory_utilization` allows and sequences could use."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens in a KV-cache block; our kernels and FlashAttention 2 do not take every number."""
    max_num_seqs: int | None = None
    """Sequences running at once; None: 256 on CUDA, 16 on the CPU."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None: 16,384 on CUDA, 1,024 on the CPU."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of equal prefixes."""
    run_ahead: bool | None = None
    """Launch the next step before the last one is read; None: on CUDA yes, on the CPU no."""
    enforce_eager: bool = False
    """Launch every kernel of a step by itself instead of replaying CUDA graphs."""
    deterministic: bool = False
    """The same request gives the same ids, whatever shares its batch and however its prompt was
    cut, cached or preempted. Slower: all batch sizes are computed in one way."""
    attention_backend: AttentionBackendName = "auto"
    """Which attention runs; `auto` takes the fastest that fits and says which."""
    generation_config: Literal["auto", "none"] = "auto"
    """`auto`: sampling defaults from the checkpoint's generation_config.json."""
    tensor_parallel_size: int = 1
    """GPUs that each hold a share of the model; on the CPU, processes."""
    seed: int | None = None
    """Seeds requests that name no seed of their own; None: fresh entropy."""

    def __post_init__(self) -> None:
        model: object = self.model
        if isinstance(model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(model))
        elif not isinstance(model, str):
            raise UsageError(f"model must be text or a path, got {model!r}", param="model")
        for name, choices in (
            ("device", get_args(DeviceName)),
            ("dtype", get_args(DTypeName)),
            ("kv_cache_dtype", get_args(KVCacheDTypeName)),
            ("load_format", get_args(LoadFormat)),
            ("attention_backend", get_args(AttentionBackendName)),
            ("generation_config", ("auto", "none")),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(
                    f"{name} must be one of {', '.join(choices)}, got {value!r}", param=name
                )
        for name in (
            *("max_model_len", "num_blocks", "block_size", "max_num_seqs"),
            *("max_num_batched_tokens", "tensor_parallel_size"),
        ):
            self._check_between(name, 1, MAX_INT)
        self._check_between("seed", -MAX_SEED, MAX_SEED)
        for name in ("enable_prefix_caching", "run_ahead", "enforce_eager", "deterministic"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "run_ahead"):
                raise UsageError(f"{name} must be True or False, got {value!r}", param=name)
        share: object = self.memory_utilization
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if share is not None and not (is_number and 0 < share <= 1):  # type: ignore[operator]
            raise UsageError(
                f"memory_utilization must be over 0 and at most 1, got {share!r}",
                param="memory_utilization",
            )

    def _check_between(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageError(f"{name} must be a whole number, got {value!r}", param=name)
        if value is not None and value < low:
            wrong = f"{name} must be at least {low}, got {value!r}"
            raise UsageError(wrong, hint=self._hint_of(name), param=name)
        if value is not None and value > high:
            wrong = f"{name} must be at most {high}, got {value!r}"
            raise UsageError(wrong, hint=self._hint_of(name), param=name)

    def _hint_of(self, name: str) -> str | None:
        if name != "block_size":
            return None
        if self.attention_backend == "fa2":
            return "fa2 takes multiples of 256."
        ours = "triton takes 16, 32, 64, 128 or 256"
        if self.attention_backend == "triton":
            return f"{ours}; {DEFAULT_BLOCK_SIZE} is the default."
        if self.attention_backend == "auto" and self.device != "cpu":
            return f"{DEFAULT_BLOCK_SIZE} is the default; on a GPU {ours}."
        return f"{DEFAULT_BLOCK_SIZE} is the default."

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Build from keyword options; those that are None count as not given.

        Raises `UsageError` for a name that is no field.
        """
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise UsageError(
                    f"there is no engine option {name!r}", hint=meant(name, known), param=name
                )
        return cls(**{k: v for k, v in options.items() if v is not None})

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)


_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")


def parse_length(text: str) -> int:
    """A token count as people write it: `4096`, `32k` (32,768), `1M` (1,048,576).

    Raises `UsageError` for anything else.
    """
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no token count", hint="Write 4096, 32k or 1M.")
    number, unit = match.groups()
    value = float(number) * {"": 1, "k": 1024, "m": 1024**2}[unit.lower()]
    if value > MAX_INT:
        raise UsageError(f"{text!r} is more than {MAX_INT} tokens", hint="Write 4096, 32k or 1M.")
    if value != int(value) or value < 1:
        raise UsageError(f"{text!r} is no whole number of tokens", hint="Write 4096, 32k or 1M.")
    return int(value)
