"""Options that say which model runs and how, for every command that has an engine.

`EngineOptions` is all of them at once, for `bundles.bundled`; some commands take a few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from nvcli.cli.command import typed_names
from nvcli.cli.declare import CLUSTER, FLOAT, INT, LENGTH, MODEL, argument, option
from nvcli.config import EngineConfig
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from nvcli.cluster.replicated_engine import ReplicatedEngine

ModelArg = Annotated[str | None, argument("MODEL", "As -m: a folder or a Hugging Face id.")]
ModelOpt = Annotated[
    str | None,
    option(
        MODEL,
        "-m, --model MODEL",
        "A local folder or a Hugging Face id; without it the built-in demo model.",
        envvar="NVCLI_MODEL",
    ),
]
DeviceOpt = Annotated[
    str | None,
    option(
        MODEL, "--device auto|cuda|cpu", "Where to run; auto takes CUDA when a device is there."
    ),
]
DTypeOpt = Annotated[
    str | None,
    option(
        MODEL,
        "--dtype NAME",
        "auto, float32, float16 or bfloat16; auto: float32 on the CPU, 16 bits on CUDA.",
    ),
]
KVCacheDTypeOpt = Annotated[
    str | None,
    option(
        MODEL,
        "--kv-cache-dtype NAME",
        "Type of cached keys and values, also fp8 (half of 16 bits); auto follows --dtype.",
    ),
]
LoadFormatOpt = Annotated[
    str | None,
    option(
        MODEL,
        "--load-format auto|safetensors|dummy",
        "dummy fills random weights, for speed work without a download.",
    ),
]
EnforceEagerOpt = Annotated[
    bool,
    option(
        MODEL,
        "--enforce-eager",
        "Launch each kernel by itself, without CUDA graphs; to look for a fault.",
    ),
]
RunAheadOpt = Annotated[
    bool | None,
    option(
        MODEL,
        "--run-ahead/--no-run-ahead",
        "Launch a step before the last one is read; same tokens. Default: on CUDA yes.",
    ),
]
AttentionBackendOpt = Annotated[
    str | None,
    option(
        MODEL,
        "--attention-backend NAME",
        "auto, triton, fa3, fa2 or torch; auto takes the fastest that fits, -v tells which.",
    ),
]
BlockSizeOpt = Annotated[
    int | None,
    option(
        MODEL,
        "--block-size N",
        "Tokens of a block of the KV cache; default 16. triton takes powers of two up to 256, fa2 "
        "multiples of 256.",
        INT,
    ),
]
DeterministicOpt = Annotated[
    bool,
    option(MODEL, "--deterministic", "Exactly the same tokens, whatever shares the batch; slower."),
]
MaxModelLenOpt = Annotated[
    int | None,
    option(
        MODEL,
        "--max-model-len N",
        "Prompt plus answer limit in tokens, also as 32k; default: what the model allows.",
        LENGTH,
    ),
]
MemoryOpt = Annotated[
    float | None,
    option(
        MODEL,
        "--gpu-memory-utilization X",
        "Share of memory for weights and KV cache, over 0 to 1; default 0.9 (CPU: 0.5).",
        FLOAT,
    ),
]
MaxNumSeqsOpt = Annotated[
    int | None,
    option(MODEL, "--max-num-seqs N", "Sequences running at once; default 256 (CPU: 16).", INT),
]
TensorParallelOpt = Annotated[
    int | None,
    option(
        MODEL,
        "--tensor-parallel-size, --tp N",
        "GPUs that hold the model together (CPU: processes); default 1.",
        INT,
    ),
]
ReplicasOpt = Annotated[
    int | None,
    option(
        CLUSTER,
        "--replicas N",
        "Engines that share the work, each in a Ray actor; pip install 'nvcli[ray]'.",
        INT,
    ),
]
RayAddressOpt = Annotated[
    str | None,
    option(
        CLUSTER,
        "--ray-address ADDRESS",
        "Of a running cluster; default: RAY_ADDRESS, or one on this machine.",
    ),
]
AttachOpt = Annotated[
    str | None,
    option(
        MODEL,
        "--attach auto|never|URL|uds",
        "Use a running nvcli serve: at this URL or socket; auto: your own, if one runs.",
        envvar="NVCLI_ATTACH",
    ),
]


@dataclass
class EngineOptions:
    """Which model, and how it runs."""

    model: ModelOpt = None
    device: DeviceOpt = None
    dtype: DTypeOpt = None
    max_model_len: MaxModelLenOpt = None
    gpu_memory_utilization: MemoryOpt = None
    kv_cache_dtype: KVCacheDTypeOpt = None
    max_num_seqs: MaxNumSeqsOpt = None
    tensor_parallel_size: TensorParallelOpt = None
    load_format: LoadFormatOpt = None
    attention_backend: AttentionBackendOpt = None
    block_size: BlockSizeOpt = None
    run_ahead: RunAheadOpt = None
    enforce_eager: EnforceEagerOpt = False
    deterministic: DeterministicOpt = False

    def given(self) -> dict[str, Any]:
        """What was given, as `EngineConfig` names it."""
        values = dict(vars(self))
        values["memory_utilization"] = values.pop("gpu_memory_utilization")
        for switch in ("enforce_eager", "deterministic"):  # off as if not given
            values[switch] = values[switch] or None
        return {k: v for k, v in values.items() if v is not None}

    def config(self, model: str | None = None) -> EngineConfig:
        """`model` in place of --model. An empty name is one that was given."""
        chosen = self.model if model is None else model
        return EngineConfig.from_options(**{**self.given(), "model": chosen})


def one_model(ctx: typer.Context, argument: str | None, option: str | None) -> str | None:
    """The model that MODEL or --model names; MODEL wins over a file and the environment.

    Raises `UsageError` where the command line names two.
    """
    if argument not in (None, option) and "model" in typed_names(ctx):
        raise UsageError("MODEL and --model name two models", hint="Leave one out.")
    return option if argument is None else argument


def check_replicas(replicas: int | None, ray_address: str | None) -> None:
    """Raises `UsageError`."""
    if replicas is None and ray_address is not None:
        raise UsageError("--ray-address is for --replicas N")
    if replicas is not None and replicas < 1:
        raise UsageError(f"--replicas must be at least 1, got {replicas}", param="replicas")


def replicas_loader(
    config: EngineConfig, num_replicas: int, address: str | None, note: Callable[[str], None]
) -> Callable[[], ReplicatedEngine]:
    """Raises `UsageError` at once where Ray is not installed; what `ReplicatedEngine` raises comes
    when it is called."""
    from nvcli.cluster.runtime import require_ray

    require_ray()

    def load() -> ReplicatedEngine:
        from nvcli.cluster.replicated_engine import ReplicatedEngine

        return ReplicatedEngine(config, num_replicas, address=address, note=note)

    return load
