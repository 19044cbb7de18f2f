"""What several GPUs add to the physical model: the all-reduces of tensor parallelism, and replicas
as queues beside each other.

A layer ends two matrix products with a sum over the ranks, and the embedding one more. Each costs a
latency, which is less for few rows (`nvcli.parallel.short_rows`), and moves 2 (n - 1) / n of its
bytes over the link of each GPU (a ring's share; Thakur, Rabenseifner, Gropp 2005; that ours writes
more is left out). The logits of a sampled token are gathered once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nvcli.bench.machine import longest_fit
from nvcli.bench.perf_model import Cost

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.bench.perf_model import Hardware
    from nvcli.bench.shape import Shape
    from nvcli.bench.under_load import Prediction, Traffic


@dataclass(frozen=True, slots=True)
class Link:
    """Between the GPUs of a machine."""

    bandwidth: float  # bytes/s, one direction, of one GPU
    latency_s: float  # of NCCL's all-reduce of a few KB
    short_s: float  # of our own, of few rows


PCIE = Link(25e9, 25e-6, 25e-6)  # what ours takes there, nobody has tried
# Datasheets' NVLink bandwidth of one direction. The latencies of two H200s are measured, in a step
# with the norm (`tensor_parallel.jsonl`); for the others they are taken to be no better.
LINKS = {
    "B200": Link(900e9, 12e-6, 4e-6),
    "H200": Link(450e9, 8e-6, 3.4e-6),
    "H100 PCIe": PCIE,
    "H100": Link(450e9, 12e-6, 4e-6),
    "GH200": Link(450e9, 12e-6, 4e-6),
    "A100": Link(300e9, 15e-6, 5e-6),
}


def link_of(gpu: str) -> Link:
    """By any part of the GPU's name; PCIe where NVLink is not known of."""
    key = longest_fit(gpu, LINKS)
    return PCIE if key is None else LINKS[key]


def spread(shape: Shape, hardware: Hardware, size: int) -> tuple[Shape, Hardware, Cost]:
    """The model over so many GPUs: what they hold and are together, and what a step costs."""
    if size == 1:
        return shape, hardware, Cost.from_datasheet(shape, hardware)
    from nvcli.parallel import short_rows

    link = link_of(hardware.name)
    shape = replace(shape, kv_heads=max(shape.kv_heads, size))  # replicated where there are fewer
    hardware = hardware.times(size)
    num_sums = 2 * shape.layers + 1
    share = (size - 1) / size
    moved = num_sums * 2 * share * shape.hidden * shape.weight_bytes  # for a token
    gathered = share * shape.vocab * shape.weight_bytes  # for a sampled token
    fixed = num_sums * link.short_s + link.latency_s
    cost = replace(
        Cost.from_datasheet(shape, hardware),
        fixed=fixed,
        prefill_fixed=fixed,
        few_rows=short_rows(size, shape.hidden, shape.weight_bytes),
        many_rows_more=num_sums * (link.latency_s - link.short_s),
        per_token=moved / link.bandwidth,
        per_sequence=gathered / link.bandwidth,
    )
    return shape, hardware, cost


def closed_over(replicas: int, concurrency: int, one: Callable[[int], Prediction]) -> Prediction:
    """A closed loop whose requests are shared out evenly. one: a replica's, at its concurrency."""
    each, more = divmod(concurrency, replicas)
    parts = [(n, one(b)) for n, b in ((more, each + 1), (replicas - more, each)) if n and b]
    rate = sum(n * p.requests_per_s for n, p in parts)

    def mean(value: Callable[[Prediction], float]) -> float:
        return sum(n * p.requests_per_s * value(p) for n, p in parts) / rate

    busiest = parts[0][1]
    return replace(
        busiest,
        concurrency=concurrency,
        requests_per_s=rate,
        output_tokens_per_s=sum(n * p.output_tokens_per_s for n, p in parts),
        ttft_s=mean(lambda p: p.ttft_s),
        tpot_s=None if busiest.tpot_s is None else mean(lambda p: p.tpot_s or 0.0),
        e2e_s=concurrency / rate,
        wait_s=mean(lambda p: p.wait_s),
    )


def open_over(
    replicas: int, rate: float, traffic: Traffic, slots: int, arrival_cv: float
) -> Prediction | None:
    """Arrivals dealt out among replicas: each a queue of its own at its share of the rate. A router
    that looks for the shortest queue waits less, so the wait is an upper estimate.
    """
    found = traffic.open(rate / replicas, slots, arrival_cv)
    if found is None or replicas == 1:
        return found
    return replace(
        found,
        concurrency=replicas * found.concurrency,
        requests_per_s=rate,
        output_tokens_per_s=rate * traffic.n_out,
    )
