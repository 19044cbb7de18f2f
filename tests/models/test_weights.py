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
from tests.tiny import INDEX_NAME, write_tensors, write_tiny_checkpoint

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
def test_dummy_needs_no_file_and_is_seeded(tmp_path: Path, tied: bool) -> None:
    write_tiny_checkpoint(tmp_path, tied=tied, attention_bias=True)
    (tmp_path / "model.safetensors").unlink()
    first, second = (load_tiny(tmp_path, load_format="dummy") for _ in range(2))
    assert_filled(first)
    assert is_tied(first) == tied
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    layers = first.model.layers
    a, b = (dict(layer.named_parameters())["mlp.down_proj.weight"] for layer in layers)
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
