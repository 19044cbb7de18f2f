"""Models: a checkpoint folder -> a module that computes hidden states and logits.

Architectures are imported when a checkpoint asks for them, so this package stays free of torch
until a model is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from nvcli.models.config import ModelConfig
    from nvcli.models.qwen3 import Qwen3ForCausalLM
    from nvcli.parallel import TPGroup

# architecture in config.json -> module and class, for each that `ModelConfig.from_hf` lets through;
# the dense ones differ by `ModelConfig` alone
ARCHITECTURES = {
    "Qwen3ForCausalLM": ("nvcli.models.qwen3", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": ("nvcli.models.qwen3_moe", "Qwen3MoeForCausalLM"),
    "Qwen2ForCausalLM": ("nvcli.models.qwen3", "Qwen3ForCausalLM"),
    "LlamaForCausalLM": ("nvcli.models.qwen3", "Qwen3ForCausalLM"),
}


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    group: TPGroup | None = None,
) -> Qwen3ForCausalLM:
    """Build the model on the device and fill it; its parameters are inference tensors.

    load_format: `auto` and `safetensors` read the folder's files; `dummy` fills seeded random
    weights and needs no file but config.json.
    group: holds the model together, each rank its share; None: this process alone.

    Raises `WeightsError` when the files are missing, damaged or do not match the configuration.
    """
    import torch

    from nvcli.models.weights import fill_dummy, load_weights
    from nvcli.parallel import SOLO

    module, name = ARCHITECTURES[config.architecture]
    model_class: type[Qwen3ForCausalLM] = getattr(import_module(module), name)
    with torch.inference_mode():
        model = model_class(config, dtype=dtype, device=device, group=group or SOLO)
        if load_format == "dummy":
            fill_dummy(model, is_tied=config.tie_word_embeddings)
        else:
            load_weights(model, folder, is_tied=config.tie_word_embeddings)
    return model.eval()
