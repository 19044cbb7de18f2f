"""Options that say which model runs and how, for every command that has an engine.

`EngineOptions` is all of them at once, for `bundles.bundled`; some commands take a few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from nvcli.cli.declare import CLUSTER, FLOAT, INT, LENGTH, MODEL, option
from nvcli.config import DEFAULT_MODEL, EngineConfig
from nvcli.errors import UsageError

ModelOpt = Annotated[
    str | None,
    option(
        "-m",
        "--model",
        metavar="MODEL",
        group=MODEL,
        envvar="NVCLI_MODEL",
        help="A local folder or a Hugging Face id; without it the built-in demo model.",
    ),
]
DeviceOpt = Annotated[
    str | None,
    option(
        "--device",
        metavar="auto|cuda|cpu",
        group=MODEL,
        help="Where to run; auto takes CUDA when a device is there.",
    ),
]
DTypeOpt = Annotated[
    str | None,
    option(
        "--dtype",
        metavar="NAME",
        group=MODEL,
        help="auto, float32, float16 or bfloat16; auto: float32 on the CPU, 16 bits on CUDA.",
    ),
]
KVCacheDTypeOpt = Annotated[
    str | None,
    option(
        "--kv-cache-dtype",
        metavar="NAME",
        group=MODEL,
        help="Type of cached keys and values, also fp8 (half of 16 bits); auto follows --dtype.",
    ),
]
LoadFormatOpt = Annotated[
    str | None,
    option(
        "--load-format",
        metavar="auto|safetensors|dummy",
        group=MODEL,
        help="dummy fills random weights, for speed work without a download.",
    ),
]
EnforceEagerOpt = Annotated[
    bool,
    option(
        "--enforce-eager",
        group=MODEL,
        help="Launch each kernel by itself, without CUDA graphs; to look for a fault.",
    ),
]
DeterministicOpt = Annotated[
    bool,
    option(
        "--deterministic",
        group=MODEL,
        help="Exactly the same tokens, whatever shares the batch; slower.",
    ),
]
MaxModelLenOpt = Annotated[
    int | None,
    option(
        "--max-model-len",
        metavar="N",
        group=MODEL,
        parser=LENGTH,
        help="Prompt plus answer limit in tokens, also as 32k; default: what the model allows.",
    ),
]
MemoryOpt = Annotated[
    float | None,
    option(
        "--gpu-memory-utilization",
        parser=FLOAT,
        metavar="X",
        group=MODEL,
        help="Share of memory for weights and KV cache, over 0 to 1; default 0.9 (CPU: 0.5).",
    ),
]
MaxNumSeqsOpt = Annotated[
    int | None,
    option(
        "--max-num-seqs",
        parser=INT,
        metavar="N",
        group=MODEL,
        help="Sequences running at once; default 256 (CPU: 16).",
    ),
]
TensorParallelOpt = Annotated[
    int | None,
    option(
        "--tensor-parallel-size",
        "--tp",
        parser=INT,
        metavar="N",
        group=MODEL,
        help="GPUs that hold the model together (CPU: processes); default 1.",
    ),
]
ReplicasOpt = Annotated[
    int | None,
    option(
        "--replicas",
        parser=INT,
        metavar="N",
        group=CLUSTER,
        help="Engines that share the work, each in a Ray actor; pip install 'nvcli[ray]'.",
    ),
]
RayAddressOpt = Annotated[
    str | None,
    option(
        "--ray-address",
        metavar="ADDRESS",
        group=CLUSTER,
        help="Of a running cluster; default: RAY_ADDRESS, or one on this machine.",
    ),
]
AttachOpt = Annotated[
    str | None,
    option(
        "--attach",
        metavar="auto|never|URL|uds",
        group=MODEL,
        envvar="NVCLI_ATTACH",
        help="Use a running nvcli serve: at this URL or socket; auto: your own, if one runs.",
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
    enforce_eager: EnforceEagerOpt = False
    deterministic: DeterministicOpt = False

    def given(self) -> dict[str, Any]:
        """What was given, as `EngineConfig` names it."""
        values = dict(vars(self))
        values["memory_utilization"] = values.pop("gpu_memory_utilization")
        return {k: v for k, v in values.items() if v is not None and v is not False}

    def config(self, model: str | None = None) -> EngineConfig:
        return EngineConfig.from_options(
            **{"model": DEFAULT_MODEL, **self.given(), **({"model": model} if model else {})}
        )


def check_replicas(replicas: int | None, ray_address: str | None) -> None:
    """Raises `UsageError`."""
    if replicas is None and ray_address is not None:
        raise UsageError("--ray-address is for --replicas N")
    if replicas is not None and replicas < 1:
        raise UsageError(f"--replicas must be at least 1, got {replicas}", param="replicas")
