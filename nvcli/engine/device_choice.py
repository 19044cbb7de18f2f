"""What `auto` means: the device, the type of weights and activations, the type of the KV cache; and
what becomes of fp8 weights.
"""

from __future__ import annotations

import torch

from nvcli import kernels
from nvcli.errors import DeviceError


def resolve_device(name: str) -> torch.device:
    """Raises `DeviceError` when CUDA is asked for and there is none."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            "--device cuda: there is no CUDA device, or torch was built without CUDA",
            hint="Use --device cpu.",
            param="device",
        )
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str, device: torch.device, checkpoint_dtype: str) -> torch.dtype:
    """`auto`: float32 on the CPU; on CUDA as in the checkpoint, bfloat16 for one in float32."""
    if name == "auto":
        is_half = checkpoint_dtype in ("float16", "bfloat16")
        name = "float32" if device.type == "cpu" else checkpoint_dtype if is_half else "bfloat16"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """`auto`: as the activations, which are `dtype`."""
    if name == "auto":
        return dtype
    named = getattr(torch, "float8_e4m3fn" if name == "fp8" else name)
    assert isinstance(named, torch.dtype), name
    return named


def weights_dtype(dtype: torch.dtype, device: torch.device, *, is_fp8: bool) -> str:
    """How the layers' weights lie in memory, in a report's words. is_fp8: in the checkpoint."""
    name = str(dtype).removeprefix("torch.")
    if not is_fp8:
        return name
    return "float8_e4m3fn" if kernels.keeps_fp8(device) else f"{name} from float8_e4m3fn"
