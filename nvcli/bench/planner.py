"""What a plan starts from: a stored calibration, or a checkpoint's numbers and a datasheet."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nvcli.bench import calibrate
from nvcli.bench.engine_run import BYTES, model_name
from nvcli.bench.machine import DATASHEET, cpu_name, hardware_of, known_gpu
from nvcli.bench.parallel import spread
from nvcli.bench.perf_model import PerfModel
from nvcli.bench.plan import Plan
from nvcli.bench.shape import Shape
from nvcli.config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from nvcli.engine.buckets import Buckets
from nvcli.errors import OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.bench.perf_model import Hardware
    from nvcli.models.config import ModelConfig

WITHOUT_FP8 = ("A100-SXM4-80GB", "A100", "A10", "RTX 3090")  # before compute capability 8.9
BLOCK_SIZE = 16


def make_plan(
    model: str,
    *,
    gpu: str | None,
    device: str | None,
    dtype: str | None,
    share: float | None,
    slots: int | None,
    n_in: int,
    n_out: int,
    lens: Sequence[int] = (),
    tensor_parallel_size: int = 1,
    replicas: int = 1,
) -> Plan:
    """lens: of prompts, equally likely, where they are not all of `n_in`.

    Raises `UsageError` for a GPU that no datasheet is known of, a model that cannot be spread over
    so many, or lengths beyond its context; `ModelError` for the model.
    """
    path = Path(model)
    name = model_name(str(path.resolve().parent) if path.name == "config.json" else model)
    found = None
    if gpu is None and device is None and dtype is None and share is None:
        found = calibrate.find(name, tensor_parallel_size)
    make = partial(
        Plan, name, n_in=n_in, n_out=n_out, calibration=found, replicas=replicas, lens=lens
    )
    if found is not None and not found.is_limited:
        _check_context(name, n_in, n_out, found.max_model_len)
        return make(
            found.perf_model,
            found.hardware,
            slots=slots or found.slots,
            num_blocks=found.num_blocks or 0,
            block_size=found.block_size,
        )
    config = _config(model)
    config.check_tensor_parallel(tensor_parallel_size)
    _check_context(name, n_in, n_out, config.max_model_len)
    shape, hardware, kind, memory = _describe(config, gpu, device, dtype, tensor_parallel_size)
    activations = tensor_parallel_size * _activations(shape, kind)
    shape, hardware, cost = spread(shape, hardware, tensor_parallel_size)
    usable = (share or (0.9 if kind == "cuda" else 0.5)) * tensor_parallel_size * memory
    usable -= shape.bytes_of_weights + activations
    num_blocks = int(usable // (shape.kv_bytes_per_token * BLOCK_SIZE))
    if num_blocks < 1:
        raise OutOfMemoryError(
            f"the weights of {name} ({shape.bytes_of_weights / 1e9:.1f} GB) leave no room for a "
            f"KV cache on {hardware.name}"
        )
    budget, places = MAX_NUM_BATCHED_TOKENS[kind], slots or MAX_NUM_SEQS[kind]
    buckets = None
    if kind == "cuda":
        buckets = Buckets.of(places, budget, shape.num_params // tensor_parallel_size)
    model_of = PerfModel(shape, cost, budget, int(kind == "cuda"), buckets)
    if found is not None:
        model_of, hardware = found.perf_model, found.hardware
    return make(model_of, hardware, slots=places, num_blocks=num_blocks, block_size=BLOCK_SIZE)


def _config(model: str) -> ModelConfig:
    from nvcli.models.config import ModelConfig
    from nvcli.models.resolve import some_files

    with some_files(model, "config.json") as folder:
        return ModelConfig.from_hf(folder)


def _check_context(name: str, n_in: int, n_out: int, longest: int | None) -> None:
    if longest is not None and n_in + n_out > longest:
        raise UsageError(
            f"{n_in:,} tokens in and {n_out:,} out do not fit the context of {name}, "
            f"{longest:,} tokens",
            hint="Lower --in-len or --out-len.",
            param="in_len",
        )


def _describe(
    config: ModelConfig, gpu: str | None, device: str | None, dtype: str | None, size: int
) -> tuple[Shape, Hardware, str, float]:
    """(shape, hardware, cuda or cpu, bytes of memory), the last three of one device."""
    if gpu is not None:
        known = known_gpu(gpu)
        if known is None:
            raise UsageError(
                f"no datasheet of {gpu!r} is known", hint=f"Known: {', '.join(DATASHEET)}."
            )
        kind, memory, hardware = "cuda", DATASHEET[known.name][2], known
        stored = dtype if dtype not in (None, "auto") else _half(config.dtype)
        is_fp8 = config.is_fp8 and known.name not in WITHOUT_FP8
        return _shape(config, stored, is_fp8=is_fp8), hardware, kind, memory
    import torch

    from nvcli import kernels
    from nvcli.engine.device_choice import resolve_device, resolve_dtype
    from nvcli.engine.kv_cache import available_memory

    where = resolve_device(device or "auto")
    kind = where.type
    stored = str(resolve_dtype(dtype or "auto", where, config.dtype)).removeprefix("torch.")
    if kind == "cuda":
        place = torch.cuda.get_device_name(where)
        memory = float(torch.cuda.get_device_properties(where).total_memory)
    elif size > 1:
        raise UsageError(
            "--tensor-parallel-size is planned for GPUs: on a CPU the ranks share what one has",
            hint="Name one: --gpu H200.",
            param="tensor_parallel_size",
        )
    else:
        place, memory = cpu_name(), float(available_memory())
    is_fp8 = config.is_fp8 and kernels.keeps_fp8(where)
    shape = _shape(config, stored, is_fp8=is_fp8)
    return shape, hardware_of(kind, place, stored), kind, memory


def _half(checkpoint: str) -> str:
    return checkpoint if checkpoint in ("float16", "bfloat16") else "bfloat16"


def _shape(config: ModelConfig, dtype: str | None, *, is_fp8: bool) -> Shape:
    if dtype not in BYTES:
        raise UsageError(f"there is no dtype {dtype!r}", param="dtype")
    return Shape.of(config, weight_bytes=BYTES[dtype], kv_bytes=BYTES[dtype], is_fp8=is_fp8)


def _activations(shape: Shape, kind: str) -> int:
    """Of a step with a full token budget: the widest layer's rows, in and out. Experts' are one for
    each expert of a token.
    """
    tokens = MAX_NUM_BATCHED_TOKENS[kind]
    widths = [4 * (shape.intermediate + shape.hidden)]
    if shape.moe_layers:
        row = shape.expert_intermediate + shape.hidden
        experts = shape.experts_per_token * row + 4 * shape.hidden
        widths = [experts, *widths] if shape.moe_layers < shape.layers else [experts]
    return tokens * max(widths) * shape.weight_bytes
