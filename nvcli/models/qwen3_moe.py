"""Qwen3-MoE: Qwen3 with experts in place of the MLP, in all layers or in some.

Embedding, attention, norms and head are `qwen3`'s. Padding of a captured step goes to no expert,
since that expert's weights would be read for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvcli.layers.moe import MoE
from nvcli.models.qwen3 import Qwen3ForCausalLM, Qwen3Layer, Qwen3MLP, Qwen3Model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nvcli.layers.forward_batch import ForwardBatch
    from nvcli.models.config import ModelConfig


class Qwen3MoeLayer(Qwen3Layer):
    @staticmethod
    def mlp_class(config: ModelConfig, layer: int) -> type[nn.Module]:
        assert config.moe is not None, "a configuration without experts"
        return MoE if config.moe.has_experts(layer) else Qwen3MLP

    def forward_mlp(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(self.mlp, MoE):
            return super().forward_mlp(x, residual, batch, wanted)
        is_token = batch.is_token()
        if is_token is not None and wanted is not None:
            is_token = batch.seq_lens > 0  # what a row without keys names is another row's token
        x, residual = self.mlp(x, residual, self.post_attention_layernorm, is_token)
        return x, residual


class Qwen3MoeModel(Qwen3Model):
    layer_class = Qwen3MoeLayer


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    model_class = Qwen3MoeModel
