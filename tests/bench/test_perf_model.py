"""The physical model against numbers worked out by hand and against the table of dense Qwen3."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nvcli.bench.perf_model import Cost, Hardware, PerfModel
from nvcli.bench.shape import Shape, pairs_of
from nvcli.engine.buckets import Buckets

QWEN3 = {  # d, layers, h, k, f, tied -> parameters, GB/step, GB of weights, KV bytes, attention
    "0.6B": ((1024, 28, 16, 8, 3072, True), 596_049_920, 1.192, 1.192, 114_688, 229_376),
    "1.7B": ((2048, 28, 16, 8, 6144, True), 1_720_574_976, 3.441, 3.441, 114_688, 229_376),
    "4B": ((2560, 36, 32, 8, 9728, True), 4_022_468_096, 8.045, 8.045, 147_456, 589_824),
    "8B": ((4096, 36, 32, 8, 12288, False), 8_190_735_360, 15.137, 16.381, 147_456, 589_824),
    "14B": ((5120, 40, 40, 8, 17408, False), 14_768_307_200, 27.981, 29.537, 163_840, 819_200),
    "32B": ((5120, 64, 64, 8, 25600, False), 32_762_123_264, 63.968, 65.524, 262_144, 2_097_152),
}


def shape(name: str) -> Shape:
    d, layers, h, k, f, tied = QWEN3[name][0]
    return Shape(d, layers, h, k, 128, f, 151_936, tied)


@pytest.mark.parametrize("name", QWEN3)
def test_constants_of_qwen3(name: str) -> None:
    _, params, step, weights, kv, attention = QWEN3[name]
    found = shape(name)
    assert found.num_params == params
    assert round(found.bytes_per_step / 1e9, 3) == step
    assert round(found.bytes_of_weights / 1e9, 3) == weights
    assert found.kv_bytes_per_token == kv
    assert found.attention_flops == attention


H200 = Hardware("H200", 4.8e12, 989e12)
# 30B-A3B: 48 layers of 128 experts of 768, 8 a token
MOE = Shape(
    *(2048, 48, 32, 4, 128, 6144, 151_936, False),
    moe_layers=48,
    experts=128,
    experts_per_token=8,
    expert_intermediate=768,
)


def test_constants_of_experts() -> None:
    assert MOE.num_params == 30_532_122_624
    assert MOE.num_params - 120 * MOE.p_expert == 3_353_032_704  # active, the embedding included
    assert [round(MOE.bytes_per_step * MOE.reading(b) / 1e9, 1) for b in (0.5, 1, 32, 256)] == [
        *(6.1, 6.1, 53.1, 60.4)
    ]
    # A half of the layers dense: routers and experts of the others only.
    some = replace(MOE, moe_layers=24)
    assert MOE.p_lin - some.p_lin == 24 * 2048 * (128 + 3 * 8 * 768 - 3 * 6144)
    assert shape("8B").reading(100) == 1


def test_costs_of_experts() -> None:
    """Streaming grows with the experts that are hit, and the floors with it."""
    model = PerfModel(MOE, Cost.from_datasheet(MOE, H200))
    assert model.decode_floor(H200) == pytest.approx(6.084e9 / 4.8e12, rel=1e-3)
    assert model.decode_floor(H200, 32) == pytest.approx(53.09e9 / 4.8e12, rel=1e-3)
    assert model.prefill_floor(H200, 64) == pytest.approx(MOE.reading(64) * 6.084e9 / 4.8e12, 1e-3)
    streamed = model.step(32, 0) / model.step(1, 0)
    assert streamed == pytest.approx(MOE.reading(32))
    assert not model.is_compute_bound(256)


def test_fp8_weights_are_a_byte_each_and_their_scales() -> None:
    dense = shape("8B")
    fp8 = replace(dense, is_fp8=True)
    saved = dense.p_lin - 4 * dense.p_lin // 128**2
    assert dense.bytes_per_step - fp8.bytes_per_step == saved
    assert dense.bytes_of_weights - fp8.bytes_of_weights == saved
    assert round(fp8.bytes_of_weights / 1e9, 3) == 9.437
    assert fp8.linear_flops(7, 1) == dense.linear_flops(7, 1)


def test_pairs() -> None:
    assert pairs_of(4, 0) == 1 + 2 + 3 + 4
    assert pairs_of(2, 10) == 11 + 12


def test_floors() -> None:
    small = PerfModel(shape("0.6B"), Cost.from_datasheet(shape("0.6B"), H200))
    assert small.decode_floor(H200) == pytest.approx(0.248e-3, abs=1e-6)
    big = PerfModel(shape("8B"), Cost.from_datasheet(shape("8B"), H200))
    assert big.decode_floor(H200) == pytest.approx(15.137e9 / 4.8e12, rel=1e-4)
    assert big.prefill(1024) > big.prefill_floor(H200, 1024)


# The constants of the specification's simulated case: Qwen3-8B, I = 1024, O = 256.
FIXED = Cost(
    fixed=4.542e-3 - 3.9419e-3,
    per_sequence=6e-6,
    weights=3.9419e-3,
    per_kv_token=38.4e-9,
    per_linear_flop=1 / (989e12 * 0.6),
    per_attention_flop=1 / (989e12 * 0.6),
    prefill_fixed=0.0,
)


def test_prefill_of_the_specification() -> None:
    model = PerfModel(shape("8B"), FIXED)
    assert model.prefill(1024) == pytest.approx(25.1e-3, rel=0.02)
    assert model.serial_share(1024, 256) == pytest.approx(0.0316, rel=0.2)


def test_little_holds_by_construction() -> None:
    model = PerfModel(shape("8B"), FIXED)
    for b in (1, 2, 8, 64, 256):
        found = model.under(1024, 256).closed(b)
        assert found.requests_per_s * found.e2e_s == pytest.approx(b)
    assert (
        20 < model.under(1024, 256).throughput(256) < 26
    )  # the specification: 22.18 and an Amdahl
    assert model.under(1024, 256).closed(256).bound == "compute"  # ceiling of 26.35
    assert model.under(1024, 256).closed(64).bound == "memory"


def test_beyond_the_slots_requests_wait_in_line() -> None:
    model = PerfModel(shape("8B"), FIXED)
    full, over = (
        model.under(1024, 256).closed(64, slots=64),
        model.under(1024, 256).closed(96, slots=64),
    )
    assert over.requests_per_s == full.requests_per_s
    assert over.wait_s == pytest.approx(32 / full.requests_per_s)
    assert over.ttft_s == pytest.approx(full.ttft_s + over.wait_s)


SMALL = Shape(256, 6, 4, 2, 128, 768, 4096, True, weight_bytes=4, kv_bytes=4)


def test_an_open_loop_keeps_little_s_law_and_has_an_end() -> None:
    model = PerfModel(shape("8B"), FIXED)
    top = model.under(1024, 256).throughput(64)
    found = model.under(1024, 256).open(0.6 * top, 64)
    assert found is not None
    assert found.requests_per_s * found.e2e_s == pytest.approx(found.concurrency)
    assert model.under(1024, 256).open(1.01 * top, 64) is None


def test_what_the_cache_holds_needs_no_prefill() -> None:
    model = PerfModel(shape("8B"), FIXED)
    for b in (1, 8):
        whole, warm = model.under(1024, 64).closed(b), model.under(1024, 64, cached=1008).closed(b)
        assert warm.ttft_s < 0.7 * whole.ttft_s
        assert warm.requests_per_s > whole.requests_per_s
        # keys and values of the prefix are read all the same
        assert warm.tpot_s is not None
        assert warm.tpot_s >= model.decode(b, 1024)
    assert model.under(1024, 64, cached=1008).closed(1).ttft_s == pytest.approx(
        model.prefill(1024, 1008)
    )


def test_stay_of_two_by_hand() -> None:
    """Steps of 10 ms, prompts of 100 ms more, 4 tokens: each of two stays 1 + 1 + 3 steps, and
    in a fifth of its steps the other's prompt is computed: 5 x 10 + 2 x 100 ms."""
    cost = Cost(0.0, 0.0, 10e-3, 0.0, 0.0, 0.1 / SMALL.attention_flops, 0.0)
    model = PerfModel(SMALL, cost, budget=1024)
    assert pairs_of(1, 0) == 1
    found = model.under(1, 4).closed(2)
    assert found.e2e_s == pytest.approx(0.250)
    assert found.ttft_s == pytest.approx(2 * 0.010 + 0.1 + 2 * 0.1 / 5)
    assert found.tpot_s == pytest.approx(0.010 + 0.1 / 5)
    ahead = PerfModel(SMALL, cost, budget=1024, depth=1).under(1, 4).closed(2)
    assert ahead.e2e_s == pytest.approx(6 * 0.010 + 0.2)
    assert ahead.ttft_s == pytest.approx(3 * 0.010 + 0.1 + 3 * 0.1 / 6)


def test_one_token_has_no_tpot() -> None:
    model = PerfModel(shape("8B"), FIXED)
    assert model.under(100, 1).closed(4).tpot_s is None
    assert model.under(1, 1).closed(1).ttft_s > 0
    found = model.under(10, 1).open(1.0, 8)
    assert found is not None
    assert found.tpot_s is None


def test_long_prompts_take_several_steps() -> None:
    model = PerfModel(shape("0.6B"), FIXED, budget=1024)
    whole = PerfModel(shape("0.6B"), FIXED).prefill(4096)
    assert model.prefill(4096) == pytest.approx(
        sum(model.step(0, 0, 1024, pairs_of(1024, c), 1) for c in (0, 1024, 2048, 3072))
    )
    assert model.prefill(4096) > whole
    assert model.prefill(4096, cached=3072) < model.prefill(4096)


def test_a_step_costs_its_bucket() -> None:
    """0.6B with 256 slots: prompts up to 4,096 tokens are captured, and logits of all rows."""
    small = shape("0.6B")
    buckets = Buckets.of(256, 16_384, small.num_params)
    cost = Cost(0.0, 0.0, 0.0, 0.0, 1e-15, 0.0, 0.0)
    model = PerfModel(small, cost, buckets=buckets)

    def flops(tokens: float, rows: float) -> float:
        return pytest.approx(1e-15 * (2 * tokens * small.p_lin + 2 * rows * small.p_head))

    assert model.step(0, 0, 1024, heads=1) == flops(1024, 256)
    assert model.step(0, 0, 1025, heads=1) == flops(1280, 256)
    assert model.step(0, 0, 1280, heads=1) == flops(1280, 256)
    assert model.step(8, 0, 1024, heads=1) == flops(1280, 256)
    assert model.step(0, 0, 100, heads=1) == flops(128, 128)
    assert model.step(0, 0, 4097, heads=1) == flops(4097, 1)  # eager, as it is
    assert model.step(9, 0) == flops(16, 16)
    assert model.step(8.5, 0) == flops(16, 16)  # a mean
    assert PerfModel(small, cost).step(9, 0) == flops(9, 9)


def test_a_model_comes_back_from_json_whole() -> None:
    buckets = Buckets.of(64, 16_384, 8_000_000_000)
    cost = replace(FIXED, seen=((8, 8300.0, 0, 1.1),), lone=5e-3, lone_per_kv_token=4e-8)
    model = PerfModel(shape("8B"), cost, depth=1, buckets=buckets)
    stored = json.loads(json.dumps(model.as_json(H200)))
    assert PerfModel.from_json(stored) == (model, H200)
    bare = PerfModel(shape("8B"), FIXED)
    assert PerfModel.from_json(json.loads(json.dumps(bare.as_json(H200)))) == (bare, H200)


def test_steps_near_measured_ones_are_corrected_as_they_were() -> None:
    seen = ((8, 8000.0, 0, 1.2), (64, 64_000.0, 0, 0.9), (0, 0.0, 1024, 1.1))
    model = PerfModel(shape("8B"), replace(FIXED, seen=seen))
    for b, S, p, factor in seen:
        assert model.step(b, S, p) == pytest.approx(factor * model.law(b, S, p))
    assert 0.9 < model.correction(22, 22_000) < 1.2
    assert model.correction(0, 0, 4096) == pytest.approx(1.1)  # of its kind only
    assert model.correction(8, 8000, 512) == 1  # none of this kind was measured


def test_a_spread_of_lengths_is_the_mean_of_its_parts() -> None:
    model = PerfModel(shape("8B"), FIXED)
    wide = model.under(1024, 16, lens=[512, 1536]).closed(1)
    assert wide.ttft_s == pytest.approx((model.prefill(512) + model.prefill(1536)) / 2)
    assert wide.ttft_s > model.under(1024, 16).closed(1).ttft_s  # attention grows with the square
    same = model.under(1024, 16, lens=[1024, 1024]).closed(8)
    assert same.e2e_s == pytest.approx(model.under(1024, 16).closed(8).e2e_s)
    assert model.under(1024, 16, lens=[512, 1536]).closed(8).e2e_s > same.e2e_s
