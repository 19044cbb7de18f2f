"""The speed workloads: the token counts that make them comparable, floors by hand, the driver."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine import measure, workloads
from benchmarks.engine.workloads import SHAPES, Job, Shape

SMALL = SHAPES["qwen3-0.6b"]


def test_offline_batch_is_the_bench_of_nano_vllm() -> None:
    job = workloads.offline_batch()
    assert (job.num_prompt_tokens, job.num_output_tokens) == (142_827, 133_966)
    assert (len(job.prompts), max(job.output_lens), job.temperature) == (256, 1024, 0.6)
    later = workloads.offline_batch(1)
    assert [len(p) for p in later.prompts] == [len(p) for p in job.prompts]
    assert later.output_lens == job.output_lens
    assert not {t for p in later.prompts for t in p} & {t for p in job.prompts for t in p}
    assert max(t for p in workloads.offline_batch(3).prompts for t in p) < SMALL.vocab


def test_shared_prefix() -> None:
    cold, warm = (workloads.shared_prefix(0, is_warm=w) for w in (False, True))
    assert {tuple(p[:2048]) for p in (*cold.prompts, *warm.prompts)} == {
        tuple(cold.prompts[0][:2048])
    }
    assert len({tuple(p[2048:]) for p in (*cold.prompts, *warm.prompts)}) == 512
    assert workloads.shared_prefix(1, is_warm=False).prompts[0][:2048] != cold.prompts[0][:2048]


def test_sizes_of_the_shapes() -> None:
    # 596 million in matrices, the embedding being the head; 112 KiB of keys and values a token
    assert SMALL.body_params + SMALL.head_params == 595_984_384
    assert SMALL.kv_bytes_per_token == 114_688
    config = SMALL.config()
    assert config["num_key_value_heads"] == 8
    assert json.dumps(config)


def test_experts_are_read_where_they_are_hit() -> None:
    big = SHAPES["qwen3-30b-a3b"]
    # 3.04 billion weights for one token, all 30.2 billion (less the embedding) for very many
    assert big.params_read(1) == big.body_params + big.head_params == 3_041_656_832
    assert big.params_read(10_000) == pytest.approx(30_220_746_752)
    assert big.moe is not None
    assert [round(big.moe.num_hit(n)) for n in (1, 32, 256)] == [8, 112, 128]
    # two outputs, one of a step less: a step of two tokens, then one of one
    read = 2 * (big.params_read(2) + big.params_read(1)) + (2 + 3 + 2) * big.kv_bytes_per_token
    floor = workloads.decode_floor_s(big, [1, 1], [3, 2])
    assert floor == pytest.approx(read / workloads.READ_BYTES_PER_S)


def test_floors_by_hand() -> None:
    shape = Shape(hidden=2, inner=3, layers=1, heads=2, kv_heads=1, tied=True, head_dim=4, vocab=5)
    # qkv 2 x 16, o 8 x 2, gate, up and down 3 x 6, all twice for 16 bits; head 2 x 5
    assert shape.body_params == 2 * (8 + 4 + 4) + 8 * 2 + 3 * 6
    weights = 2 * (shape.body_params + 10)
    # one prompt of 3 and two outputs: one decode step over 4 keys of 2 x 4 x 2 bytes
    seconds = workloads.decode_floor_s(shape, [3], [2])
    assert seconds == pytest.approx((weights + 4 * 16) / workloads.READ_BYTES_PER_S)
    operations = 2 * shape.body_params * 3 + 2 * 10 + 2 * 9 * 2 * 4
    assert workloads.prefill_floor_s(shape, [3]) == pytest.approx(operations / workloads.FLOPS)
    job = Job([[1, 2, 3]], [2], 0.0)
    both = seconds + workloads.prefill_floor_s(shape, [3])
    assert workloads.floor_s(shape, job) == pytest.approx(both)


def test_fp8_weights_have_a_floor_of_their_own() -> None:
    dense, fp8 = SHAPES["qwen3-8b"], SHAPES["qwen3-8b-fp8"]
    assert dense.bytes_read(1) == 15_136_194_560
    # 6,945,767,424 bytes in the layers and 423,936 scales of 4; a head of 622,329,856 in 16 bits
    assert fp8.bytes_read(8) == 6_945_767_424 + 4 * 423_936 + 2 * 622_329_856
    floors = [1e3 * workloads.decode_floor_s(shape, [1], [2]) for shape in (dense, fp8)]
    assert floors == [pytest.approx(3.371, abs=1e-3), pytest.approx(1.824, abs=1e-3)]
    assert workloads.prefill_floor_s(dense, [512]) == workloads.prefill_floor_s(fp8, [512])
    assert fp8.config()["quantization_config"]
    assert fp8.config().keys() - dense.config().keys() == {"quantization_config"}


def test_an_fp8_cache_halves_the_floor_of_keys() -> None:
    fp8 = replace(SMALL, fp8_cache=True)
    assert fp8.kv_bytes_per_token == 57_344
    assert fp8.bytes_read(8) == SMALL.bytes_read(8)
    job = workloads.offline_batch()
    rates = [job.num_output_tokens / workloads.floor_s(shape, job) for shape in (SMALL, fp8)]
    assert [round(rate, -2) for rate in rates] == [37_900, 67_300]


def test_the_measured_floor_is_that_of_the_engines_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Shape] = []

    def see(engine: object, shape: Shape, repeat: int) -> dict[str, dict[str, Any]]:
        seen.append(shape)
        return {}

    monkeypatch.setattr(measure, "warm_up", lambda engine: None)
    monkeypatch.setitem(measure._MEASURES, "A", see)
    for dtype in ("bfloat16", "float8_e4m3fn", None):  # vLLM tells nothing
        told = {} if dtype is None else {"kv_cache_dtype": dtype}
        engine: Any = SimpleNamespace(report=lambda told=told: told)
        measure.measure(engine, SMALL, "A", 1, lambda name, values: None)
    assert seen == [SMALL, replace(SMALL, fp8_cache=True), SMALL]


def test_the_floor_of_a_shared_prefix_by_hand() -> None:
    shape = Shape(hidden=2, inner=3, layers=1, heads=2, kv_heads=1, tied=True, head_dim=4, vocab=5)
    job = Job([[7, 7, 7, 1], [7, 7, 7, 2]], [2, 3], 0.0)
    # five tokens are computed; the three see 4.5 keys, the others 3 and half of their own
    operations = 2 * shape.body_params * 5 + 2 * 10 * 2 + 4 * (4.5 + 3.5 + 3.5) * 2 * 4
    # two decode steps: three keys of 16 bytes once each, and of their own 2 and 2, then 3
    num_bytes = 2 * 2 * (shape.body_params + 10) + (2 * 3 + 2 + 2 + 3) * 16
    wanted = operations / workloads.FLOPS + num_bytes / workloads.READ_BYTES_PER_S
    assert workloads.shared_floor_s(shape, job, 3) == pytest.approx(wanted)
    job = workloads.shared_prefix(0, is_warm=False)
    assert workloads.shared_floor_s(SMALL, job, 2048) == pytest.approx(0.0912, abs=1e-4)


@pytest.mark.torch
def test_the_driver_measures_a_tiny_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.engine import __main__ as driver
    from benchmarks.engine.engines import Nvcli

    shape = Shape(64, 96, 2, 4, 2, tied=True, head_dim=32, vocab=12_000)
    monkeypatch.setattr(workloads, "streams", lambda seed, n: tiny_job(seed, n, 6))
    monkeypatch.setattr(workloads, "prefill", lambda seed: tiny_job(seed, 3, 1))
    monkeypatch.setattr(workloads, "offline_batch", lambda seed: tiny_job(seed, 3, 4))
    monkeypatch.setattr(workloads, "shared_prefix", lambda n, is_warm: tiny_job(9, 3, 4))
    monkeypatch.setattr(workloads, "SHARED_TOKENS", 8)
    monkeypatch.setattr(workloads, "long_prompt", lambda seed: tiny_job(seed, 1, 1))
    monkeypatch.setattr(measure, "warm_up", lambda engine: None)
    monkeypatch.setattr(measure, "BATCHES", (2,))
    (tmp_path / "config.json").write_text(json.dumps(shape.config()))
    engine = Nvcli(tmp_path, 128, {"device": "cpu", "num_blocks": 100})
    told: list[str] = []
    try:
        metrics = measure.measure(engine, shape, measure.ALL, 1, lambda name, _: told.append(name))
        report = engine.report()
    finally:
        engine.close()
    assert told == list(metrics) == ["B", "C2", "A", "D", "E", "L"]
    assert all(0 <= found["floor_share"] < 1 for found in metrics.values())
    for name in ("A", "E"):  # three outputs of four tokens
        assert metrics[name]["step_ms"] * metrics[name]["tok_s"] == pytest.approx(3000, rel=1e-2)
    assert metrics["B"]["tpot_ms"] > 0
    assert metrics["C2"]["tok_s"] > 0
    assert report["attention"] == "torch"
    record: dict[str, Any] = {"metrics": metrics}
    driver.print_table({"nvcli": record, "vllm": record})
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:]] == ["workload", *told]
    assert all("1.00x" in line for line in table[2:])


def tiny_job(seed: int, count: int, outputs: int) -> Job:
    return Job(workloads.random_prompts(seed, count, 12), [outputs] * count, 0.0)
