"""`nvcli models`, `nvcli tokens`, `nvcli doctor`: what they tell, and how they fail."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from nvcli.cli import checks
from nvcli.models.resolve import demo_folder
from tests.cli.conftest import Cli


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache with one model, as huggingface_hub lays it out."""
    hub = tmp_path / "hub"
    repository = hub / "models--Example--Tiny"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for file in demo_folder().iterdir():
        if file.suffix in (".json", ".safetensors"):
            data = file.read_bytes()
            is_large = file.suffix == ".safetensors"
            name = hashlib.sha256(data) if is_large else hashlib.sha1(b"blob %d\0" % len(data))
            if not is_large:
                name.update(data)
            blob = repository / "blobs" / name.hexdigest()
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(blob)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    return repository


def test_list(cli: Cli) -> None:
    assert [line.split()[0] for line in cli("models", "list").out.splitlines()] == [
        "demo",
        "Example/Tiny",
    ]
    assert cli("models", "list", "-q").out == "demo\nExample/Tiny\n"
    rows = json.loads(cli("models", "list", "--json").out)
    assert rows[1]["name"] == "Example/Tiny"
    assert rows[1]["bytes"] > 10_000_000


def test_show(cli: Cli) -> None:
    facts = json.loads(cli("models", "show", "Example/Tiny", "--json").out)
    assert facts["parameters"] == 6_951_680
    assert (facts["layers"], facts["context"], facts["kv_bytes_per_token"]) == (6, 2048, 6144)
    assert "6 951 680" in cli("models", "show", "demo").out


@pytest.mark.torch
def test_show_tells_active_parameters_of_experts(cli: Cli, tmp_path: Path) -> None:
    from tests.tiny import write_tiny_checkpoint

    tensors = write_tiny_checkpoint(tmp_path, architecture="Qwen3MoeForCausalLM")
    facts = json.loads(cli("models", "show", str(tmp_path), "--json").out)
    total = sum(tensor.numel() for tensor in tensors.values())
    assert (facts["parameters"], facts["experts"], facts["experts_per_token"]) == (total, 6, 2)
    assert facts["active_parameters"] == total - 4 * 2 * 3 * 64 * 40  # 4 idle in each of 2 layers
    text = cli("models", "show", str(tmp_path)).out
    assert f"{facts['active_parameters']:,}".replace(",", " ") in text


def test_a_model_with_fp8_weights(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.fp8_checkpoint import FP8, write_fp8_checkpoint
    from tests.text.tiny_tokenizer import write_tokenizer

    folder = tmp_path / "tiny-fp8"
    tensors = write_fp8_checkpoint(folder)
    write_tokenizer(folder, vocab_size=290)
    sizes = {name: t.numel() for name, t in tensors.items() if not name.endswith("_scale_inv")}
    fp8 = sum(t.numel() for t in tensors.values() if t.dtype == FP8)
    facts = json.loads(cli("models", "show", str(folder), "--json").out)
    assert facts["parameters"] == sum(sizes.values())
    assert facts["weight_bytes"] == sum(t.nbytes for t in tensors.values())
    assert facts["quantization"] == "fp8, a scale for 128 x 128 weights"
    assert "quantization        -" in cli("models", "show", "demo").out
    result = cli("models", "verify", str(folder))
    assert (result.code, "BAD" in result.out) == (0, False)

    def memory() -> str:
        checks = json.loads(cli("doctor", "-m", str(folder), "--device", "cpu", "--json").out)
        return next(c["text"] for c in checks["checks"] if c["name"] == "memory")

    dense = f"{4 * sum(sizes.values()) / 1e6:.1f} MB of weights"
    assert memory().startswith(f"{dense} (fp8 ones become float32 here) and")
    monkeypatch.setattr("nvcli.kernels.keeps_fp8", lambda device: True)
    kept = 4 * (sum(sizes.values()) - fp8) + fp8 + 4 * fp8 // 128**2
    assert memory().startswith(f"{kept / 1e6:.1f} MB of weights and")


def test_verify_finds_what_is_damaged(cli: Cli, cache: Path) -> None:
    result = cli("models", "verify", "Example/Tiny")
    assert (result.code, result.err) == (0, "")
    assert "BAD" not in result.out
    weights = (cache / "snapshots" / "abc" / "model.safetensors").resolve()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    result = cli("models", "verify", "Example/Tiny")
    assert result.code == 3
    assert "BAD  model.safetensors  its content does not match its hash" in result.out
    weights.write_bytes(data[:-5])
    result = cli("models", "verify", "Example/Tiny", "--json")
    found = json.loads(result.out)
    assert not found["ok"]
    assert "its header tells of" in next(f["problem"] for f in found["files"] if f["problem"])
    (cache / "snapshots" / "abc" / "config.json").unlink()
    assert cli("models", "verify", str(cache / "snapshots" / "abc")).code == 3


def test_rm_asks_and_never_touches_a_folder(cli: Cli, cache: Path) -> None:
    assert cli("models", "rm", "Example/Tiny").code == 2
    assert cache.exists()
    assert cli("models", "rm", "Example/Tiny", terminals=("in",), stdin=b"n\n").code == 1
    assert cache.exists()
    assert cli("models", "rm", str(cache)).code == 3
    assert cli("models", "rm", "demo").code == 3
    assert cli("models", "rm", "../../etc").code == 3
    assert cli("models", "rm", "Example/Tiny", "--yes").code == 0
    assert not cache.exists()


def test_pull_without_a_network_is_exit_3_and_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = cli("models", "pull", "Example/Other")
    assert (result.code, result.err.count("\n")) == (3, 1)
    assert "HF_HUB_OFFLINE" in result.err
    assert cli("models", "pull", "nonsense").code == 3


def test_unknown_model_names_pull(cli: Cli) -> None:
    result = cli("tokens", "-m", "Example/Other", "x")
    assert (result.code, result.err.count("\n")) == (3, 1)
    assert "nvcli models pull Example/Other" in result.err


def test_group_has_help_and_suggestions(cli: Cli) -> None:
    assert cli("models").out == cli("models", "-h").out
    assert cli("models", "lst").err == ("nvcli: there is no command 'lst'. Did you mean 'list'?\n")


def test_tokens(cli: Cli) -> None:
    assert cli("tokens", "Hello there").out == "2\n"
    assert cli("tokens", stdin=b"Hello there").out == "2\n"
    assert cli("tokens", "-", stdin=b"Hello there").out == "2\n"
    ids = cli("tokens", "--ids", "Hello there").out.split()
    found = json.loads(cli("tokens", "--json", "Hello there").out)
    assert [str(i) for i in found["ids"]] == ids
    assert (found["model"], found["count"], found["text"]) == ("demo", 2, "Hello there")


def test_tokens_of_the_templated_prompt(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("note")
    result = cli("tokens", "--chat", "--show", "-s", "Be brief", "Hi")
    assert result.out.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi")
    count = int(cli("tokens", "--chat", "-s", "Be brief", "Hi").out)
    assert result.err == f"{count} tokens\n"
    assert "```n.txt" in cli("tokens", "--show", "-f", str(tmp_path / "n.txt"), "Hi").out
    assert cli("tokens", "-s", "x", "Hi").code == 2
    assert cli("tokens", "--ids", "--json", "Hi").code == 2
    assert cli("tokens", terminals=("in",)).code == 2
    assert cli.loads == []


@pytest.mark.torch
def test_doctor_tells_what_blocks(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli("doctor", "--device", "cpu", "--json")
    found = json.loads(result.out)
    assert result.code == 0, result.out
    assert found["ok"]
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert {"nvcli", "torch", "flash-attn", "driver", "model", "memory", "terminal"} <= set(states)
    assert states["memory"] == "ok"
    result = cli("doctor", "--device", "cpu", "--max-model-len", "1M")
    assert result.code == 1
    assert "FAIL  memory" in result.out
    assert "checks failed: memory" in result.err
    large = cli("doctor", "--device", "cpu", "--block-size", "100000000")
    assert "FAIL  memory" in large.out
    assert "two blocks of 100000000 tokens need" in large.out
    assert "Use a --block-size of at most" in large.out
    monkeypatch.setattr("nvcli.engine.kv_cache.available_memory", lambda: 60_000_000)
    tight = cli("doctor", "--device", "cpu").out
    assert "warn  memory" in tight
    assert "The context will be" in tight
    asked = cli("doctor", "--device", "cpu", "--max-model-len", "2k")
    assert asked.code == 1
    assert "or less" in asked.out
    result = cli("doctor", "-m", "Example/Other", "--device", "cpu")
    assert (result.code, "models pull Example/Other" in result.out) == (1, True)


@pytest.mark.torch
@pytest.mark.skipif(checks.DRIVER_FILE.exists(), reason="there is an NVIDIA driver")
def test_doctor_looks_at_the_attention_that_is_asked_for(cli: Cli) -> None:
    def attention(*args: str) -> tuple[int, dict[str, str]]:
        result = cli("doctor", "--device", "cpu", "--json", *args)
        checks = json.loads(result.out)["checks"]
        return result.code, next(check for check in checks if check["name"] == "attention")

    code, found = attention("--attention-backend", "fa2", "--block-size", "256")
    assert (code, found["state"]) == (1, "fail")
    assert found["text"] == "attention backend fa2 cannot run: it needs a CUDA device"
    code, found = attention("--attention-backend", "torch", "--block-size", "32")
    assert (code, found["state"]) == (0, "ok")


def test_doctor_cuda_without_one(cli: Cli) -> None:
    result = cli("doctor", "--device", "cuda")
    assert result.code == 1
    assert "FAIL  device" in result.out


def test_a_template_that_is_none_is_the_models_fault(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_folder(), folder)
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "chat_template": "{% for m in messages %}\n{{ no( }}"}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for args in (
        ["tokens", "--chat", "-m", str(folder), "x"],
        ["chat", "--dry-run", "-m", str(folder), "x"],
        ["models", "verify", str(folder)],
    ):
        result = cli(*args)
        assert result.code == 3, args
        assert "chat template, line 2" in result.err + result.out
    assert "FAIL  tokenizer" in cli("doctor", "-m", str(folder)).out
    assert cli("tokens", "-m", str(folder), "Hello there").out == "2\n"


def test_an_empty_name_is_refused(cli: Cli) -> None:
    for args in (["tokens", "-m", "", "x"], ["models", "show", ""], ["models", "verify", " "]):
        result = cli(*args)
        assert (result.code, result.err.count("\n")) == (3, 1)
        assert "is empty" in result.err
    assert cli("models", "rm", "demo", "--yes").err == (
        "nvcli: demo is built in and cannot be removed\n"
    )
