"""fp8 weights in a checkpoint's configuration: float8_e4m3fn with a scale for each block of 128 by
128, as in Qwen3-*-FP8. Every other quantisation is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.types import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvcli.models.json_file import JsonFile

# What the configuration has to say, where it says something.
SETTINGS = {
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    "scale_fmt": "float",
    "modules_to_convert": [],
}
# The last word of what is never fp8 here, and of every norm.
DENSE = ("lm_head", "embed_tokens", "gate")


def read_fp8(raw: JsonFile, sizes: Iterable[int], *, has_experts: bool) -> bool:
    """Whether the layers' weights are fp8; without a quantization_config they are dense.

    sizes: of the weights' rows and columns. `activation_scheme: dynamic` asks for nothing that is
    stored: activations stay in 16 bits (docs/decisions/0009).
    """
    key = "quantization_config" if raw.data.get("quantization_config") else "compression_config"
    found = raw.data.get(key)
    if not found:
        return False
    if not isinstance(found, dict):
        raise raw.error(f"{key} must be an object")
    method = found.get("quant_method")
    if method != "fp8":
        raise raw.error(f"{key}: quant_method {method!r} is not supported, only 'fp8'")
    if has_experts:
        raise raw.error(f"{key}: experts in fp8 are not supported, only dense models are")
    found = {"weight_block_size": None} | found  # None: one scale for all of a weight
    for name, wanted in SETTINGS.items():
        value = found.get(name, wanted)
        if value != wanted and not (value is None and name != "weight_block_size"):
            raise raw.error(f"{key}: {name} {value!r} is not supported, only {wanted!r}")
    for name in ("modules_to_not_convert", "ignored_layers"):
        dense: Any = found.get(name) or []
        if not isinstance(dense, list) or not all(isinstance(module, str) for module in dense):
            raise raw.error(f"{key}: {name} must be a list of modules' names")
        for module in dense:
            last = module.rpartition(".")[2]
            if last not in DENSE and not last.endswith("norm"):
                raise raw.error(f"{key}: {name} has {module}, whose weights have to be fp8 here")
    for size in sizes:
        if size % FP8_BLOCK:
            raise raw.error(f"fp8 weights: {size} is not made of whole blocks of {FP8_BLOCK}")
    return True
