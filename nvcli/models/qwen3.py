"""Qwen3, dense: read from top to bottom. Qwen2 and Llama differ by configuration alone, Qwen3-MoE
(`qwen3_moe`) by its layers.

Names are the checkpoint's, with q/k/v and gate/up fused. Each half of a layer gives what is to be
added to the residual, and the residual beside it, so that the addition and the next norm are one
op. Where norms come late (`layers.norm`) the addition was part of the product already: then there
is one tensor, and None for the residual. Under tensor parallelism the layers hold this rank's
share; what `o_proj`, `down_proj` and the embedding give is its part of a sum over the group, and
the next norm begins with that sum.

Dimension key: T tokens, E hidden, F intermediate, V vocabulary, R rows that need logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Unpack, cast

import torch
from torch import nn

from nvcli.kernels import tuned
from nvcli.layers.attention import Attention
from nvcli.layers.linear import Embedding, Linear
from nvcli.layers.norm import RMSNorm
from nvcli.layers.rotary import RotaryEmbedding
from nvcli.parallel import Share

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.layers.forward_batch import ForwardBatch
    from nvcli.layers.linear import Placement
    from nvcli.models.config import ModelConfig


class Qwen3MLP(nn.Module):
    def __init__(self, config: ModelConfig, **place: Unpack[Placement]) -> None:
        super().__init__()
        hidden, bias, is_fp8 = config.hidden_size, config.mlp_bias, config.is_fp8
        inner = place["group"].share(config.intermediate_size)
        gate_up = {"gate_proj": inner, "up_proj": inner}
        down = {"down_proj": Share.all_of(hidden)}
        self.gate_up_proj = Linear(hidden, gate_up, bias=bias, is_fp8=is_fp8, **place)
        self.down_proj = Linear(inner, down, bias=bias, is_fp8=is_fp8, **place)

    def forward(
        self, x: Tensor, residual: Tensor | None, norm: RMSNorm
    ) -> tuple[Tensor, Tensor | None]:  # as of a layer
        is_late = norm.is_late(x, residual)
        inner, total = norm.project_swiglu(x, residual, self.gate_up_proj)  # [T, F]
        if is_late:
            return self.down_proj.add_to(total, inner), None
        return self.down_proj.addends(inner), total


class Qwen3Layer(nn.Module):
    @staticmethod
    def mlp_class(config: ModelConfig, layer: int) -> type[nn.Module]:
        """Of one layer: they may differ."""
        return Qwen3MLP

    def __init__(self, config: ModelConfig, layer: int, **place: Unpack[Placement]) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, **place)
        self.self_attn = Attention(config, layer, **place)
        self.post_attention_layernorm = RMSNorm(hidden, eps, **place)
        self.mlp = self.mlp_class(config, layer)(config, **place)

    def forward(
        self,
        x: Tensor,  # [T, E] or addends, what the previous layer adds to the residual
        residual: Tensor | None,  # [T, E]; None where x is the sum already
        rotary: tuple[Tensor, Tensor],  # [T, D] each
        batch: ForwardBatch,
        wanted: Tensor | None = None,  # [R] int64, into T: the tokens that go on
    ) -> tuple[Tensor, Tensor | None]:  # of those: what to add next, as x, and the new residual
        x, residual = self.self_attn(x, residual, self.input_layernorm, rotary, batch, wanted)
        return self.forward_mlp(x, residual, batch, wanted)

    def forward_mlp(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The second half of `forward`, for models with experts to override."""
        x, residual = self.mlp(x, residual, self.post_attention_layernorm)
        return x, residual


class Qwen3Model(nn.Module):
    layer_class: ClassVar[type[nn.Module]] = Qwen3Layer

    def __init__(self, config: ModelConfig, **place: Unpack[Placement]) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, hidden, **place)
        self.layers = nn.ModuleList(
            self.layer_class(config, i, **place) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, **place)
        self.rotary = RotaryEmbedding(
            config.rope, config.head_dim, config.max_model_len, device=place["device"]
        )

    def forward(self, batch: ForwardBatch) -> Tensor:  # [T, E] or [R, E], after the last norm
        x, cos, sin = self.embed_tokens(batch.input_ids, batch.positions, self.rotary)
        residual, last = None, len(self.layers) - 1
        for i, layer in enumerate(self.layers):  # a slice of them would be a new module a step
            # Nothing reads the last layer's other hidden states: only keys and values are needed.
            wanted = batch.logits_indices if i == last and batch.ends_early else None
            x, residual = layer(x, residual, (cos, sin), batch, wanted)
        return self.norm.add(x, residual)[0]


class Qwen3ForCausalLM(nn.Module):
    """Inference only: call inside `torch.inference_mode()`."""

    model_class: ClassVar[type[Qwen3Model]] = Qwen3Model

    def __init__(self, config: ModelConfig, **place: Unpack[Placement]) -> None:
        super().__init__()
        self.config = config
        self.group = place["group"]
        self.model = self.model_class(config, **place)
        head = {"lm_head": self.group.padded_share(config.vocab_size)}
        self.lm_head = Linear(config.hidden_size, head, bias=False, **place)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, E] of the step's tokens, whose KV is stored on the way; where the batch
        `ends_early`, [R, E] of those at its `logits_indices`.
        """
        return cast("Tensor", self.model(batch))

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, E] -> [R, V] in the model's dtype, the padded part of the vocabulary included: the
        checkpoint's, and what makes it divide among the ranks. All ranks get all of them.

        out: where to write them, for a captured step whose logits have a fixed address.
        """
        if self.group.size == 1:
            return self.lm_head.product(hidden, None, out)
        return self.group.gather_columns(self.lm_head.product(hidden, None), out)

    def kv_limits(self) -> Tensor:
        """[L, 2, Hk] float32: bounds on keys and values of each layer and head, from the weights
        alone: see `Attention.kv_limits`.
        """
        layers = [cast("Qwen3Layer", layer) for layer in self.model.layers]
        return torch.stack([layer.self_attn.kv_limits(layer.input_layernorm) for layer in layers])

    def fold_norms(self) -> None:
        """Let norms come late (see `layers.norm`) where that is possible and faster: all of them or
        none. Not possible with several ranks, experts, biases or fp8 weights, nor in float16, which
        may not hold a product that is not divided yet.
        """
        layers = [cast("Qwen3Layer", layer) for layer in self.model.layers]
        products = [m for layer in layers for m in layer.modules() if isinstance(m, Linear)]
        is_dense = all(isinstance(layer.mlp, Qwen3MLP) for layer in layers)
        wide = (torch.bfloat16, torch.float32)
        is_plain = all(p.bias is None and p.weight.dtype in wide for p in products)
        rows = tuned.late_norm_rows(self.config.hidden_size)
        if self.group.size > 1 or not is_dense or not is_plain or rows == tuned.NO_LIMIT:
            return
        for layer in layers:
            layer.input_layernorm.fold_into(layer.self_attn.qkv_proj, rows)
            mlp = cast("Qwen3MLP", layer.mlp)
            layer.post_attention_layernorm.fold_into(mlp.gate_up_proj, rows)

    def tie_head(self) -> None:
        self.lm_head.weight = self.model.embed_tokens.weight
