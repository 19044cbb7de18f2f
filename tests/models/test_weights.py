"""Loading: the right weights, or one line that names the tensor and the file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvcli.errors import WeightsError
from nvcli.models.qwen3 import Qwen3ForCausalLM
from tests.builders_torch import load_tiny
from tests.tiny import INDEX_NAME, stack_experts, write_tensors, write_tiny_checkpoint

pytestmark = pytest.mark.torch

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SECOND_OF_3 = "model-00002-of-00003.safetensors"


def is_tied(model: Qwen3ForCausalLM) -> bool:
    return model.lm_head.weight is model.model.embed_tokens.weight


def assert_filled(model: Qwen3ForCausalLM) -> None:
    for name, parameter in model.named_parameters():
        assert not parameter.isnan().any(), name


def check_weights(model: Qwen3ForCausalLM, tensors: dict[str, Tensor]) -> None:
    """The first layer's parameters are the checkpoint's, fused where they are fused."""
    assert_filled(model)
    layer, prefix = model.model.layers[0], "model.layers.0"
    parameters = dict(layer.named_parameters())
    qkv = [tensors[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    expected = {
        "self_attn.qkv_proj.weight": torch.cat(qkv),
        "mlp.gate_up_proj.weight": torch.cat(gate_up),
        "mlp.down_proj.weight": tensors[f"{prefix}.mlp.down_proj.weight"],
        "self_attn.k_norm.weight": tensors[f"{prefix}.self_attn.k_norm.weight"],
    }
    for name, want in expected.items():
        torch.testing.assert_close(parameters[name].data, want.float(), rtol=0, atol=0)


# --- what loads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shards_and_dtypes(tmp_path: Path, shards: int, dtype: str) -> None:
    tensors = write_tiny_checkpoint(tmp_path, shards=shards, dtype=dtype)
    model = load_tiny(tmp_path)
    check_weights(model, tensors)
    torch.testing.assert_close(model.lm_head.weight.data, tensors[HEAD].float(), rtol=0, atol=0)
    assert not is_tied(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_checkpoint_in_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    model = load_tiny(tmp_path, dtype=dtype)
    assert_filled(model)
    assert torch.equal(model.lm_head.weight.data, tensors[HEAD].to(dtype))


def test_consolidated_duplicate_beside_indexed_shards(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path, shards=3)
    other = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(other, tmp_path / "consolidated.safetensors")
    save_file(other, tmp_path / "model.safetensors")
    check_weights(load_tiny(tmp_path), tensors)


def test_bare_model_names_get_their_prefix(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path, tied=True)
    write_tensors(tmp_path, {name.removeprefix("model."): t for name, t in tensors.items()})
    check_weights(load_tiny(tmp_path), tensors)


def test_saved_rotary_tables_are_ignored(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    write_tensors(tmp_path, tensors | table)
    check_weights(load_tiny(tmp_path), tensors)


# --- experts -------------------------------------------------------------------------------------

MOE = "Qwen3MoeForCausalLM"
EXPERTS = "model.layers.1.mlp.experts"


def check_experts(model: Qwen3ForCausalLM, tensors: dict[str, Tensor]) -> None:
    """The second layer's stacks are the checkpoint's experts in order, gate above up."""
    assert_filled(model)
    moe = model.model.layers[1].mlp
    expected = stack_experts(tensors)
    found = {"gate_up_proj": moe.experts.gate_up_proj, "down_proj": moe.experts.down_proj}
    for name, stack in found.items():
        assert torch.equal(stack.matrices, expected[f"{EXPERTS}.{name}"]), name
    assert torch.equal(moe.gate.weight, tensors["model.layers.1.mlp.gate.weight"])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts(tmp_path: Path, shards: int, is_stacked: bool) -> None:
    tensors = write_tiny_checkpoint(tmp_path, architecture=MOE)
    write_tensors(tmp_path, stack_experts(tensors) if is_stacked else tensors, shards=shards)
    check_experts(load_tiny(tmp_path), tensors)


@pytest.mark.parametrize("is_original", [True, False])
def test_experts_as_transformers_writes_them(tmp_path: Path, is_original: bool) -> None:
    from transformers import AutoModelForCausalLM

    tensors = write_tiny_checkpoint(tmp_path / "ours", architecture=MOE)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=is_original)
    check_experts(load_tiny(tmp_path / "theirs"), tensors)


def test_layers_may_differ_in_how_experts_are_kept(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path, architecture=MOE)
    stacked = stack_experts(tensors)
    mixed = {n: t for n, t in tensors.items() if not n.startswith(EXPERTS)}
    write_tensors(tmp_path, mixed | {n: t for n, t in stacked.items() if n.startswith(EXPERTS)})
    check_experts(load_tiny(tmp_path), tensors)


# --- tied and untied heads -----------------------------------------------------------------------


def test_tied_without_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_checkpoint(tmp_path, tied=True)
    model = load_tiny(tmp_path)
    assert is_tied(model)
    assert_filled(model)
    assert not caplog.records


def test_tied_with_equal_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = write_tiny_checkpoint(tmp_path, tied=True)
    write_tensors(tmp_path, tensors | {HEAD: tensors[EMBEDDING].clone()})
    assert is_tied(load_tiny(tmp_path))
    assert not caplog.records


def test_tied_with_another_head_keeps_it_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = write_tiny_checkpoint(tmp_path, tied=True)
    head = tensors[EMBEDDING] + 1
    write_tensors(tmp_path, tensors | {HEAD: head})
    with caplog.at_level(logging.WARNING, "nvcli"):
        model = load_tiny(tmp_path)
    assert not is_tied(model)
    assert torch.equal(model.lm_head.weight.data, head)
    assert caplog.messages == [
        f"{tmp_path}: config.json ties the head to the embedding, "
        "but lm_head.weight differs: it is kept"
    ]


def test_untied_without_head_ties_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    del tensors[HEAD]
    write_tensors(tmp_path, tensors)
    with caplog.at_level(logging.WARNING, "nvcli"):
        model = load_tiny(tmp_path)
    assert is_tied(model)
    assert_filled(model)
    assert caplog.messages == [f"{tmp_path} has no lm_head.weight: the embedding serves as head"]


# --- dummy weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", MOE])
def test_dummy_needs_no_file_and_is_seeded(tmp_path: Path, tied: bool, architecture: str) -> None:
    write_tiny_checkpoint(tmp_path, architecture=architecture, tied=tied, attention_bias=True)
    (tmp_path / "model.safetensors").unlink()
    first, second = (load_tiny(tmp_path, load_format="dummy") for _ in range(2))
    assert_filled(first)
    assert is_tied(first) == tied
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    layers = first.model.layers
    down = "mlp.experts.down_proj.weight" if architecture == MOE else "mlp.down_proj.weight"
    a, b = (dict(layer.named_parameters())[down] for layer in layers)
    assert not torch.equal(a, b)
    assert 0 < a.abs().max() < 0.2


# --- errors, as whole messages -------------------------------------------------------------------


def error_of(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        load_tiny(folder)
    return str(caught.value).replace(str(folder), "FOLDER")


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_tensors(tmp_path, tensors)
    assert error_of(tmp_path) == "FOLDER lacks model.layers.1.mlp.up_proj.weight"


def test_missing_embedding_is_never_the_head(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    del tensors[EMBEDDING]
    write_tensors(tmp_path, tensors)
    assert error_of(tmp_path) == "FOLDER lacks model.embed_tokens.weight"


def test_a_missing_layer_is_counted(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    write_tensors(tmp_path, {n: t for n, t in tensors.items() if ".layers.1." not in n})
    assert error_of(tmp_path) == ("FOLDER lacks model.layers.1.input_layernorm.weight and 10 more")


def test_extra_tensor(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    write_tensors(tmp_path, tensors | {"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)})
    assert error_of(tmp_path) == (
        "FOLDER/model.safetensors holds model.layers.2.mlp.up_proj.weight, "
        "unknown to the architecture"
    )


def test_biases_that_the_configuration_does_not_expect(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    write_tensors(tmp_path, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(128)})
    assert error_of(tmp_path) == (
        "FOLDER/model.safetensors holds model.layers.0.self_attn.q_proj.bias, "
        "unknown to the architecture"
    )


def moe_error(folder: Path, *, stacked: bool = False, drop: str = "", **extra: Tensor) -> str:
    tensors = write_tiny_checkpoint(folder, architecture=MOE)
    tensors = stack_experts(tensors) if stacked else tensors
    changed = {f"{EXPERTS}.{name.replace('__', '.')}": tensor for name, tensor in extra.items()}
    kept = {name: tensor for name, tensor in tensors.items() if name != f"{EXPERTS}.{drop}"}
    write_tensors(folder, kept | changed)
    return error_of(folder)


def test_a_missing_and_an_extra_expert(tmp_path: Path) -> None:
    name = "4.up_proj.weight"
    assert moe_error(tmp_path, drop=name) == f"FOLDER lacks {EXPERTS}.{name}"
    extra = {"6__up_proj__weight": torch.ones(40, 64)}  # there are six, from 0 on
    message = f"holds {EXPERTS}.6.up_proj.weight, unknown to the architecture"
    assert moe_error(tmp_path, **extra) == f"FOLDER/model.safetensors {message}"


def test_experts_of_one_tensor_that_is_missing_or_has_another_shape(tmp_path: Path) -> None:
    missing = f"FOLDER lacks {EXPERTS}.0.down_proj.weight and 5 more"
    assert moe_error(tmp_path, stacked=True, drop="down_proj") == missing
    message = moe_error(tmp_path, stacked=True, gate_up_proj=torch.ones(6, 40, 64))
    assert message == (
        f"FOLDER/model.safetensors: {EXPERTS}.gate_up_proj has shape [6, 40, 64], "
        "the configuration says [6, 80, 64]"
    )
    both = moe_error(tmp_path, stacked=True, **{"0__up_proj__weight": torch.ones(40, 64)})
    assert both == (
        f"FOLDER/model.safetensors holds {EXPERTS}.0.up_proj.weight, unknown to the architecture"
    )


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    write_tensors(
        tmp_path, tensors | {"model.layers.0.self_attn.k_proj.weight": torch.ones(32, 64)}
    )
    assert error_of(tmp_path) == (
        "FOLDER/model.safetensors: model.layers.0.self_attn.k_proj.weight has shape [32, 64], "
        "the configuration says [64, 64]"
    )


def test_broadcastable_shape_is_wrong_too(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    write_tensors(tmp_path, tensors | {"model.norm.weight": torch.ones(1)})
    assert error_of(tmp_path) == (
        "FOLDER/model.safetensors: model.norm.weight has shape [1], the configuration says [64]"
    )


def test_integer_tensor(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    write_tensors(tmp_path, tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    assert error_of(tmp_path) == (
        "FOLDER/model.safetensors: model.norm.weight is I8, only F64, F32, F16, BF16 are supported"
    )


def test_values_that_are_not_numbers(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = float("nan")
    write_tensors(tmp_path, tensors)
    assert error_of(tmp_path) == (
        "FOLDER: model.layers.0.mlp.up_proj.weight holds values that are not numbers"
    )


def test_missing_shard(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, shards=3)
    (tmp_path / SECOND_OF_3).unlink()
    assert error_of(tmp_path) == (
        f"FOLDER lacks the shard {SECOND_OF_3} that {INDEX_NAME} names. "
        "Download the checkpoint again."
    )


@pytest.mark.parametrize("name", ["/etc/hostname", "../model.safetensors", 7])
def test_index_points_elsewhere(tmp_path: Path, name: object) -> None:
    write_tiny_checkpoint(tmp_path / "model", shards=2)
    index = tmp_path / "model" / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {EMBEDDING: name}}))
    if name == 7:
        assert error_of(tmp_path / "model") == f"FOLDER/{INDEX_NAME} is not a safetensors index"
    else:
        assert error_of(tmp_path / "model") == (
            f"FOLDER lacks the shard {name} that {INDEX_NAME} names. Download the checkpoint again."
        )


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', "\x00"])
def test_broken_index(tmp_path: Path, text: str) -> None:
    write_tiny_checkpoint(tmp_path, shards=2)
    (tmp_path / INDEX_NAME).write_text(text)
    assert error_of(tmp_path) == f"FOLDER/{INDEX_NAME} is not a safetensors index"


def test_index_and_shard_disagree(tmp_path: Path) -> None:
    tensors = write_tiny_checkpoint(tmp_path, shards=3)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    shard = [name for name, file in index["weight_map"].items() if file == SECOND_OF_3]
    save_file({name: tensors[name] for name in shard[1:]}, tmp_path / SECOND_OF_3)
    assert error_of(tmp_path) == (f"FOLDER/{SECOND_OF_3} lacks {shard[0]}, named by {INDEX_NAME}")
    extra = {name: tensors[name] for name in shard} | {"model.stray": torch.ones(1)}
    save_file(extra, tmp_path / SECOND_OF_3)
    assert error_of(tmp_path) == (f"FOLDER/{SECOND_OF_3} holds model.stray, not in {INDEX_NAME}")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    write_tiny_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = error_of(tmp_path)
    assert message.startswith("FOLDER/model.safetensors is not a complete safetensors file: ")
    assert message.endswith(". Download it again.")
    assert "\n" not in message


def test_truncated_shard(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, shards=3)
    path = tmp_path / SECOND_OF_3
    path.write_bytes(path.read_bytes()[:-100])
    assert error_of(tmp_path).startswith(f"FOLDER/{SECOND_OF_3} is not a complete safetensors")


def test_corrupt_header(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"x" * 32
    path.write_bytes(data)
    message = error_of(tmp_path)
    assert message.startswith("FOLDER/model.safetensors is not a complete safetensors file: ")
    assert "\n" not in message


def test_pickled_weights_only(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert error_of(tmp_path) == (
        "FOLDER has only pickled weights (pytorch_model.bin), which are not read. "
        "Convert them to safetensors."
    )


def test_stray_safetensors_without_index(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, shards=3)
    (tmp_path / INDEX_NAME).unlink()
    assert error_of(tmp_path) == (
        "FOLDER has model-00001-of-00003.safetensors and 2 more but neither model.safetensors "
        "nor model.safetensors.index.json. Download the checkpoint again."
    )


def test_no_weights_at_all(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert error_of(tmp_path) == (
        "FOLDER has no weights (model.safetensors). "
        "Download them, or use --load-format dummy for random weights."
    )
