"""The speed workloads, the same token ids and lengths for every engine, and their floors.

    A  offline batch: 256 prompts and outputs of 100 to 1,024 tokens, temperature 0.6 (the bench of
       nano-vllm: its seed, its order of draws)
    B  one stream: 128 tokens in, 512 out, greedy
    C  batch decode: 8, 32, 64 or 256 streams of the same
    D  prefill: 64 prompts of 2,048 tokens, one token out
    E  shared prefix: 256 prompts with 2,048 tokens in common and 64 of their own, 64 out
    L  one prompt of 32,768 tokens, one token out

End of sequence is always ignored. A floor is what the bytes or the operations alone would take:
weights read once a step, each key and value once, at the bandwidth and rate given. Of experts,
those that the step's tokens hit if routing is uniform. A shape may have fp8 weights
(`qwen3-8b-fp8`): half the bytes, and the same operations in 16 bits. An fp8 cache halves those of
keys and values.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

from nvcli.models.moe_config import MoeConfig

READ_BYTES_PER_S = 4.49e12  # an H200, reads alone, measured
FLOPS = 777e12  # the same, bf16 matrix product, measured


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    head_dim: int = 128
    vocab: int = 151_936
    moe: MoeConfig | None = None  # in all layers
    fp8: bool = False  # the layers' weights, a byte each and a float32 for 128 x 128; dense ones
    fp8_cache: bool = False  # a byte for each element of a key or value

    def config(self) -> dict[str, object]:
        """What config.json of such a checkpoint says."""
        kind: dict[str, object] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        if self.moe is not None:
            kind = {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "num_experts": self.moe.num_experts,
                "num_experts_per_tok": self.moe.num_experts_per_tok,
                "moe_intermediate_size": self.moe.intermediate_size,
                "norm_topk_prob": self.moe.norm_topk_prob,
            }
        if self.fp8:
            kind["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["lm_head"],
            }
        return kind | {
            "attention_bias": False,
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "max_position_embeddings": 40_960,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "vocab_size": self.vocab,
        }

    @property
    def body_params(self) -> int:
        """Of all projections: what a token is multiplied with, the head aside."""
        mlp = 3 * self.hidden * self.inner
        if self.moe is not None:
            mlp = self.hidden * self.moe.num_experts
            mlp += self.moe.num_experts_per_tok * self.expert_params
        qkvo = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (qkvo + mlp)

    @property
    def expert_params(self) -> int:
        """Of one expert of one layer."""
        return 3 * self.hidden * self.moe.intermediate_size if self.moe is not None else 0

    def params_read(self, num_tokens: int) -> float:
        """Of all projections and the head, each once, in a step of so many tokens."""
        found = self.body_params + self.head_params
        if self.moe is None:
            return found
        more = self.moe.num_hit(num_tokens) - self.moe.num_experts_per_tok
        return found + self.layers * more * self.expert_params

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    def bytes_read(self, num_tokens: int) -> float:
        """Of the same."""
        if self.fp8:
            return self.body_params + 4 * self.body_params // 128**2 + 2 * self.head_params
        return 2 * self.params_read(num_tokens)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * (1 if self.fp8_cache else 2)


SHAPES = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": Shape(4096, 12_288, 36, 32, 8, tied=False),
    "qwen3-14b": Shape(5120, 17_408, 40, 40, 8, tied=False),
    "qwen3-32b": Shape(5120, 25_600, 64, 64, 8, tied=False),
    "qwen3-30b-a3b": Shape(
        *(2048, 6144, 48, 32, 4),
        tied=False,
        moe=MoeConfig(
            num_experts=128, num_experts_per_tok=8, intermediate_size=768, norm_topk_prob=True
        ),
    ),
}
SHAPES |= {
    f"{name}-fp8": replace(shape, fp8=True) for name, shape in SHAPES.items() if shape.moe is None
}


def write_shape(folder: Path, name: str, **changed: object) -> str:
    """A checkpoint's folder without weights, for `--load-format dummy`: its path. changed: entries
    of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name].config() | changed
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts and what to generate from them."""

    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def random_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(0, 10_000) for _ in range(length)] for _ in range(count)]


def offline_batch(repeat: int = 0, count: int = 256) -> Job:
    """A. A later repeat has the same lengths and other ids, so that no prefix is known."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(count)
    ]
    outputs = [rng.randint(100, 1024) for _ in range(count)]
    return Job([[t + 10_001 * repeat for t in p] for p in prompts], outputs, 0.6)


def streams(seed: int, count: int) -> Job:
    """B and C."""
    return Job(random_prompts(seed, count, 128), [512] * count, 0.0)


def prefill(repeat: int) -> Job:
    """D."""
    return Job(random_prompts(4000 + repeat, 64, 2048), [1] * 64, 0.0)


SHARED_TOKENS = 2048  # of E


def shared_prefix(trial: int, *, is_warm: bool) -> Job:
    """E. Cold: the prefix is new to the engine; warm: it is cached."""
    prefix = random_prompts(5000 + trial, 1, SHARED_TOKENS)[0]
    own = random_prompts(5100 + 10 * trial + is_warm, 256, 64)
    return Job([prefix + tail for tail in own], [64] * 256, 0.6)


def long_prompt(repeat: int) -> Job:
    """L."""
    return Job(random_prompts(6000 + repeat, 1, 32_768), [1], 0.0)


# --- floors --------------------------------------------------------------------------------------


def prefill_floor_s(shape: Shape, lengths: list[int]) -> float:
    """Projections, causal attention and one row of the head a prompt, at the matrix rate."""
    attention = sum(2 * n * n * shape.heads * shape.head_dim * shape.layers for n in lengths)
    matrices = 2 * shape.body_params * sum(lengths) + 2 * shape.head_params * len(lengths)
    return (matrices + attention) / FLOPS


def decode_floor_s(shape: Shape, prompt_lens: list[int], output_lens: list[int]) -> float:
    """Every step but the first of each output: the weights once, and all keys and values there."""
    num_keys = sum(
        (prompt + 1 + step)
        for prompt, output in zip(prompt_lens, output_lens, strict=True)
        for step in range(output - 1)
    )
    lasting = Counter(output - 1 for output in output_lens)  # steps -> outputs that take so many
    weights, running = 0.0, len(output_lens)
    for step in range(max(output_lens) - 1):
        running -= lasting[step]
        weights += shape.bytes_read(running)
    return (weights + num_keys * shape.kv_bytes_per_token) / READ_BYTES_PER_S


def shared_floor_s(shape: Shape, job: Job, num_shared: int) -> float:
    """Of E: what all prompts begin with is computed once, and its keys are read once a step."""
    own = [len(prompt) - num_shared for prompt in job.prompts]
    matrices = 2 * shape.body_params * (num_shared + sum(own)) + 2 * shape.head_params * len(own)
    pairs = num_shared**2 / 2 + sum(n * num_shared + n * n / 2 for n in own)  # of query and key
    attention = 4 * pairs * shape.heads * shape.head_dim * shape.layers
    shared_bytes = (max(job.output_lens) - 1) * num_shared * shape.kv_bytes_per_token
    prefill = (matrices + attention) / FLOPS
    return prefill + decode_floor_s(shape, own, job.output_lens) + shared_bytes / READ_BYTES_PER_S


def floor_s(shape: Shape, job: Job) -> float:
    lengths = [len(prompt) for prompt in job.prompts]
    return prefill_floor_s(shape, lengths) + decode_floor_s(shape, lengths, job.output_lens)
