"""Several GPUs in the physical model: what they hold, what agreeing costs, replicas as queues."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvcli.bench.machine import known_gpu
from nvcli.bench.parallel import PCIE, closed_over, link_of, open_over, spread
from nvcli.bench.perf_model import Cost, Hardware, PerfModel
from nvcli.bench.plan import Plan, lines
from nvcli.bench.planner import make_plan
from nvcli.bench.shape import Shape
from nvcli.errors import UsageError

SHAPE = Shape(
    hidden=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12_288,
    vocab=151_936,
    is_tied=False,
)


def h200() -> Hardware:
    found = known_gpu("NVIDIA H200")
    assert found is not None
    return found


def model(size: int = 1) -> PerfModel:
    shape, _, cost = spread(SHAPE, h200(), size)
    return PerfModel(shape, cost)


def test_one_gpu_is_as_it_was() -> None:
    assert spread(SHAPE, h200(), 1) == (SHAPE, h200(), Cost.from_datasheet(SHAPE, h200()))


def test_two_gpus_read_half_each_and_agree() -> None:
    shape, hardware, cost = spread(SHAPE, h200(), 2)
    alone = Cost.from_datasheet(SHAPE, h200())
    assert shape == SHAPE
    assert (hardware.name, hardware.count) == ("2 x H200", 2)
    assert cost.weights == pytest.approx(alone.weights / 2)
    assert cost.per_kv_token == pytest.approx(alone.per_kv_token / 2)
    # two sums a layer and the embedding's, ours for few rows, and the logits
    assert cost.fixed == pytest.approx(73 * 3.4e-6 + 8e-6)
    assert (cost.few_rows, cost.many_rows_more) == (256, pytest.approx(73 * 4.6e-6))
    # a token's sums: 73 of 8 KB, of which each GPU sends and gets one half twice
    assert cost.per_token == pytest.approx(73 * 8192 / 450e9)


def test_more_gpus_than_kv_heads_hold_them_more_than_once() -> None:
    shape, _, _ = spread(SHAPE, h200(), 16)
    assert shape.kv_bytes_per_token == 2 * SHAPE.kv_bytes_per_token


def test_a_faster_answer_and_less_than_twice_as_fast() -> None:
    gain = model(1).decode(1, 1024) / model(2).decode(1, 1024)
    assert 1.3 < gain < 2


def test_steps_of_many_rows_have_the_librarys_sums() -> None:
    two = model(2)
    few = replace(two, cost=replace(two.cost, few_rows=None))
    more = [two.decode(b, 1024) - few.decode(b, 1024) for b in (1, 256, 257, 300)]
    assert more == pytest.approx([0, 0, 73 * 4.6e-6, 73 * 4.6e-6])
    assert two.prefill(256) < two.prefill(257) - 73 * 4e-6
    over_pcie = spread(SHAPE, replace(h200(), name="L40S"), 2)[2]
    assert over_pcie.fixed == pytest.approx(74 * 25e-6)
    assert over_pcie.many_rows_more == 0


def test_links() -> None:
    assert link_of("NVIDIA H100 80GB HBM3").bandwidth == 450e9
    assert link_of("NVIDIA H100 PCIe") == PCIE
    assert link_of("NVIDIA L40S") == PCIE


def test_a_closed_loop_is_shared_out_and_keeps_to_littles_law() -> None:
    def one(b: int) -> object:
        return model().under(512, 128).closed(b, 64)

    even = closed_over(4, 32, one)  # type: ignore[arg-type]
    alone = model().under(512, 128).closed(8, 64)
    assert even.requests_per_s == pytest.approx(4 * alone.requests_per_s)
    assert even.ttft_s == pytest.approx(alone.ttft_s)
    assert even.e2e_s == pytest.approx(alone.e2e_s)
    for concurrency in (1, 3, 6, 33):
        found = closed_over(4, concurrency, one)  # type: ignore[arg-type]
        assert found.requests_per_s * found.e2e_s == pytest.approx(concurrency)
        least, most = model().under(512, 128).closed(1, 64), model().under(512, 128).closed(9, 64)
        assert least.ttft_s <= found.ttft_s <= most.ttft_s


def test_arrivals_are_dealt_out() -> None:
    def over(replicas: int, rate: float) -> object:
        return open_over(replicas, rate, model().under(512, 128), slots=64, arrival_cv=1.0)

    alone = model().under(512, 128).open(10, 64)
    found = over(4, 40.0)
    assert alone is not None
    assert found is not None
    assert found.e2e_s == pytest.approx(alone.e2e_s)  # type: ignore[attr-defined]
    assert found.concurrency == pytest.approx(4 * alone.concurrency)  # type: ignore[attr-defined]
    assert over(1, 1000.0) is None


def plan(gpu: str | None = "H200", device: str | None = None, **options: int) -> Plan:
    return make_plan(
        "demo",
        gpu=gpu,
        device=device,
        dtype=None,
        share=None,
        slots=None,
        n_in=64,
        n_out=32,
        **options,
    )


def test_a_plan_over_several() -> None:
    one, many = plan(), plan(tensor_parallel_size=2, replicas=3)
    assert many.l_max == 3 * one.l_max
    assert many.num_blocks > 1.9 * one.num_blocks
    assert many.closed()[-1].concurrency == many.l_max
    assert many.rate_max == pytest.approx(3 * many.model.under(64, 32).throughput(many.l_each))
    text = "\n".join(lines(many, explain=False))
    assert "3 replicas on 2 x H200 each" in text
    assert "assumes 8 us an all-reduce (3 up to 256 rows) and links of 450 GB/s" in text


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(UsageError, match="--tensor-parallel-size 3"):
        plan(tensor_parallel_size=3)
    with pytest.raises(UsageError, match="is planned for GPUs"):
        plan(gpu=None, device="cpu", tensor_parallel_size=2)
