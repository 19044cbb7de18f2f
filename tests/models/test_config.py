"""ModelConfig: what checkpoints say, in every spelling, and what is refused in one line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvcli.errors import ModelError, ModelNotFoundError, UnsupportedModelError, UsageError
from nvcli.models.config import ModelConfig
from nvcli.models.moe_config import MoeConfig
from nvcli.models.rope_config import RopeConfig

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GENERATION = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}
CONFIG = "FOLDER/config.json: "


def read(
    folder: Path, generation: dict[str, Any] | None = None, drop: str = "", **changes: Any
) -> ModelConfig:
    config = {key: value for key, value in (QWEN3_06B | changes).items() if key != drop}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_hf(folder)


def fp8(**changes: Any) -> dict[str, Any]:
    """quantization_config as Qwen3-0.6B-FP8 has it."""
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.post_attention_layernorm"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    return {"quantization_config": quantization | changes}


def error_of(folder: Path, **changes: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        read(folder, **changes)
    return str(caught.value).replace(str(folder), "FOLDER")


def test_qwen3(tmp_path: Path) -> None:
    config = read(tmp_path, GENERATION)
    assert config == ModelConfig(
        architecture="Qwen3ForCausalLM",
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        has_qk_norm=True,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=1e6),
        dtype="bfloat16",
        eos_token_ids=(151645, 151643),
        sampling_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    )
    assert config.max_model_len == 40960
    assert config.kv_elements_per_token * 2 == 114_688  # bytes in bfloat16


QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}


def test_qwen3_moe(tmp_path: Path) -> None:
    config = read(tmp_path, **QWEN3_30B_A3B)
    assert config.moe == MoeConfig(
        num_experts=128, num_experts_per_tok=8, intermediate_size=768, norm_topk_prob=True
    )
    assert (config.has_qk_norm, config.num_moe_layers) == (True, 48)
    head = config.vocab_size * config.hidden_size
    assert config.linear_params + head == 3_041_656_832
    assert config.linear_params_read(1) == pytest.approx(config.linear_params)
    assert config.linear_params_read(10**6) + 2 * head == pytest.approx(30_531_911_680)
    assert round(config.moe.num_hit(32)) == 112


def test_experts_as_transformers_5_names_them(tmp_path: Path) -> None:
    config = read(tmp_path, **QWEN3_30B_A3B | {"num_experts": None, "num_local_experts": 64})
    assert config.moe is not None
    assert config.moe.num_experts == 64


def test_experts_in_some_layers(tmp_path: Path) -> None:
    changes = {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 6}
    config = read(tmp_path, **QWEN3_30B_A3B | changes, drop="norm_topk_prob")
    assert config.moe is not None
    assert [config.moe.has_experts(i) for i in range(6)] == [False, False, False, True, False, True]
    assert config.num_moe_layers == 2
    assert not config.moe.norm_topk_prob
    attention = 2 * 2048 * 128 * (32 + 4)
    dense, sparse = 3 * 2048 * 6144, 2048 * 128 + 8 * 3 * 2048 * 768
    assert config.linear_params == 6 * attention + 4 * dense + 2 * sparse


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_local_experts is missing"),
        ({"num_experts": 0}, "num_experts must be a positive whole number, got 0"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than num_experts 128"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, got 'yes'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive whole number, got 0"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers must be a list of layers' numbers, got [48]"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers' numbers, got 3"),
    ],
)
def test_refusals_of_experts(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert error_of(tmp_path, **QWEN3_30B_A3B | changes) == CONFIG + message


def test_fp8_weights(tmp_path: Path) -> None:
    dense = read(tmp_path)
    assert not dense.is_fp8
    assert read(tmp_path, **fp8()) == replace(dense, is_fp8=True)
    spellings = [
        fp8(modules_to_not_convert=None, scale_fmt=None, fmt=None),
        fp8(ignored_layers=["model.norm", "model.embed_tokens", "model.layers.1.mlp.gate"]),
        fp8(scale_fmt="float", modules_to_convert=[]),
    ]
    assert all(read(tmp_path, **changes).is_fp8 for changes in spellings)


def test_ranks_share_whole_fp8_blocks(tmp_path: Path) -> None:
    """Qwen3-4B's MLP of 9,728 is 76 blocks, so it goes over 4 ranks and not over 8."""
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32}
    read(tmp_path, **sizes).check_tensor_parallel(8)
    config = read(tmp_path, **sizes, **fp8())
    config.check_tensor_parallel(4)
    with pytest.raises(UsageError) as caught:
        config.check_tensor_parallel(8)
    assert str(caught.value) == (
        "--tensor-parallel-size 8: a rank's share of 1216 would cut the fp8 weights' blocks of "
        "128. It can be 1, 2, 4."
    )
    one_head = read(tmp_path, **fp8(), head_dim=64, num_key_value_heads=2)
    with pytest.raises(UsageError, match="share of 64 would cut"):
        one_head.check_tensor_parallel(2)


def test_qwen2_has_biases_on_qkv_alone(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["Qwen2ForCausalLM"], drop="head_dim")
    assert (config.qkv_bias, config.output_bias, config.has_qk_norm) == (True, False, False)
    assert config.head_dim == 64


def test_llama_reads_its_bias_flags(tmp_path: Path) -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "head_dim": None}
    config = read(tmp_path, **llama, attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)
    assert (config.has_qk_norm, config.head_dim) == (False, 64)


def test_head_dim_need_not_be_hidden_over_heads(tmp_path: Path) -> None:
    assert read(tmp_path, drop="head_dim").head_dim == 128  # Qwen3's default, not 1024 / 16
    assert read(tmp_path, head_dim=32).head_dim == 32


def test_null_kv_heads_means_no_grouping(tmp_path: Path) -> None:
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 16


# --- end-of-sequence ids and sampling defaults ---------------------------------------------------


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (5, None, (5,)),
        (None, None, ()),
        ([5, 9], None, (5, 9)),
        (7, {"eos_token_id": [5, 9]}, (7, 5, 9)),
        (5, {"eos_token_id": [5, 9]}, (5, 9)),
        (5, {}, (5,)),
        (None, {"eos_token_id": 9}, (9,)),
        ([5, 151936, -1], None, (5,)),
    ],
)
def test_eos_is_a_union(
    tmp_path: Path, config_eos: object, generation: dict[str, Any] | None, expected: object
) -> None:
    assert read(tmp_path, generation, eos_token_id=config_eos).eos_token_ids == expected


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    defaults = read(tmp_path, {"do_sample": False, "temperature": 0.6}).sampling_defaults
    assert defaults == {"temperature": 0}


@pytest.mark.parametrize("value", ["hot", -1, True])
def test_bad_sampling_default(tmp_path: Path, value: object) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(tmp_path, {"temperature": value})
    assert str(caught.value) == (
        f"{tmp_path}/generation_config.json: temperature must be a number of at least 0, "
        f"got {value!r}"
    )


# --- dtype ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"torch_dtype": None}, "float32"),
    ],
)
def test_dtype_under_both_names(tmp_path: Path, keys: dict[str, Any], expected: str) -> None:
    assert read(tmp_path, **keys).dtype == expected


# --- RoPE ----------------------------------------------------------------------------------------

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}, "rope_theta": None},
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 32768,
        },
    ],
)
def test_yarn_in_every_spelling(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = read(tmp_path, **keys)
    assert config.rope == RopeConfig(
        theta=1e6,
        rope_type="yarn",
        factor=4.0,
        original_max_position=32768,
        attention_factor=0.1 * math.log(4) + 1,
    )
    assert config.max_model_len == config.model_len(None) == config.model_len(131072) == 131072


def test_a_length_beyond_the_model_is_a_usage_error(tmp_path: Path) -> None:
    config = read(tmp_path, max_position_embeddings=100)
    assert config.model_len(None) == 100
    assert config.model_len(60) == 60
    with pytest.raises(UsageError, match="101 is more than the model's 100") as caught:
        config.model_len(101)
    assert caught.value.exit_code == 2


def test_yarn_options(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "yarn",
        "attention_factor": 0.8,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        **YARN,
    }
    rope = read(tmp_path, rope_scaling=scaling).rope
    assert (rope.attention_factor, rope.beta_fast, rope.beta_slow) == (0.8, 16.0, 2.0)
    assert rope.truncate is False


def test_yarn_attention_factor_from_mscale(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "mscale": 2.0, "mscale_all_dim": 0.5, **YARN}
    rope = read(tmp_path, rope_scaling=scaling).rope
    assert rope.attention_factor == pytest.approx(
        (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    )


def test_default_rope_in_transformers_5_style(tmp_path: Path) -> None:
    keys = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": None}
    assert read(tmp_path, **keys).rope == RopeConfig(theta=5e5)


# --- refusals, as whole messages -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported. "
            "Supported: Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM.",
        ),
        ({"architectures": []}, CONFIG + "architectures is missing"),
        (
            {"architectures": [["x"]]},
            "architecture ['x'] is not supported. "
            "Supported: Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM.",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            CONFIG + "quantization_config: quant_method 'awq' is not supported, only 'fp8'",
        ),
        (
            {"quantization_config": {"bits": 4}},
            CONFIG + "quantization_config: quant_method None is not supported, only 'fp8'",
        ),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            CONFIG
            + "compression_config: quant_method 'compressed-tensors' is not supported, only 'fp8'",
        ),
        ({"quantization_config": "fp8"}, CONFIG + "quantization_config must be an object"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            CONFIG + "quantization_config: weight_block_size None is not supported, "
            "only [128, 128]",
        ),
        (
            fp8(weight_block_size=[64, 128]),
            CONFIG + "quantization_config: weight_block_size [64, 128] is not supported, "
            "only [128, 128]",
        ),
        (
            fp8(activation_scheme="static"),
            CONFIG + "quantization_config: activation_scheme 'static' is not supported, "
            "only 'dynamic'",
        ),
        (
            fp8(fmt="e5m2"),
            CONFIG + "quantization_config: fmt 'e5m2' is not supported, only 'e4m3'",
        ),
        (
            fp8(scale_fmt="ue8m0"),
            CONFIG + "quantization_config: scale_fmt 'ue8m0' is not supported, only 'float'",
        ),
        (
            fp8(modules_to_convert=["model.embed_tokens"]),
            CONFIG + "quantization_config: modules_to_convert ['model.embed_tokens'] "
            "is not supported, only []",
        ),
        (
            fp8(modules_to_not_convert=["lm_head", "model.layers.3.mlp.down_proj"]),
            CONFIG + "quantization_config: modules_to_not_convert has "
            "model.layers.3.mlp.down_proj, whose weights have to be fp8 here",
        ),
        (
            fp8(ignored_layers=["model.layers.0"]),
            CONFIG + "quantization_config: ignored_layers has model.layers.0, "
            "whose weights have to be fp8 here",
        ),
        (
            fp8(ignored_layers="lm_head"),
            CONFIG + "quantization_config: ignored_layers must be a list of modules' names",
        ),
        (
            fp8() | {"hidden_size": 960},
            CONFIG + "fp8 weights: 960 is not made of whole blocks of 128",
        ),
        (
            fp8() | {"num_key_value_heads": 1, "head_dim": 64},
            CONFIG + "fp8 weights: 64 is not made of whole blocks of 128",
        ),
        (
            QWEN3_30B_A3B | fp8(),
            CONFIG + "quantization_config: experts in fp8 are not supported, "
            "only dense models are",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            CONFIG + "RoPE type 'dynamic' is not supported, only default, yarn and llama3",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            CONFIG + "rope_scaling.factor is missing",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": "4"}},
            CONFIG + "rope_scaling.factor must be a positive number, got '4'",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            CONFIG + "rope_parameters must be one flat object, the same for every layer",
        ),
        (
            {"partial_rotary_factor": 0.5},
            CONFIG + "partial_rotary_factor 0.5 is not supported",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20},
            CONFIG + "sliding window attention is not supported",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            CONFIG + "sliding window attention is not supported",
        ),
        ({"hidden_act": "gelu"}, CONFIG + "hidden_act 'gelu' is not supported, only silu"),
        (
            {"torch_dtype": "float8_e4m3fn"},
            CONFIG
            + "dtype 'float8_e4m3fn' is not supported, only float32, float16 and bfloat16",
        ),
        ({"hidden_size": "big"}, CONFIG + "hidden_size must be a positive whole number, got 'big'"),
        ({"head_dim": 0}, CONFIG + "head_dim must be a positive whole number, got 0"),
        ({"drop": "vocab_size"}, CONFIG + "vocab_size is missing"),
        ({"num_key_value_heads": 5}, CONFIG + "16 heads cannot share 5 KV heads"),
        ({"head_dim": 33}, CONFIG + "head_dim must be even for RoPE, got 33"),
        ({"tie_word_embeddings": 1}, CONFIG + "tie_word_embeddings must be true or false, got 1"),
        (
            {"eos_token_id": "</s>"},
            CONFIG + "eos_token_id must be a token id or a list of them, got '</s>'",
        ),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert error_of(tmp_path, **changes) == message


def test_a_window_that_no_layer_uses_is_fine(tmp_path: Path) -> None:
    read(tmp_path, use_sliding_window=True, sliding_window=4096, max_window_layers=28)
    read(tmp_path, use_sliding_window=False, sliding_window=4096, max_window_layers=0)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        ModelConfig.from_hf(tmp_path / "absent")
    assert str(caught.value) == f"there is no folder {tmp_path / 'absent'}"


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        ModelConfig.from_hf(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has no config.json. "
        "Name the folder that holds config.json and the safetensors files."
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "is not valid JSON: Expecting property name enclosed in double quotes: "
               "line 1 column 2 (char 1)"),
        (b"[]", "is not a JSON object"),
        (b"", "is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"a": "\xff"}', "is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 7: "
                           "invalid start byte"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    read(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_hf(tmp_path)
    assert str(caught.value) == f"{tmp_path / name} {message}"


def test_reading_a_configuration_needs_no_torch() -> None:
    code = "import sys, nvcli.models.config; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
