"""`bench plan`: no load, only arithmetic. What a machine holds, what it will deliver, what binds.

Predictions come from a stored calibration, or from a datasheet and priors, and say which. Outside
of twice the calibrated range they are marked.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nvcli.bench.limits import binding, graph_size, limit_rows, safe_slots
from nvcli.bench.metrics import ms
from nvcli.bench.parallel import closed_over, link_of, open_over
from nvcli.bench.sweep import ladder
from nvcli.bench.text import number, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.bench.calibrate import Calibration
    from nvcli.bench.perf_model import Hardware, PerfModel
    from nvcli.bench.under_load import Prediction, Traffic


@dataclass(slots=True)
class Plan:
    model_name: str
    model: PerfModel
    hardware: Hardware
    n_in: int
    n_out: int
    slots: int
    num_blocks: int
    block_size: int
    calibration: Calibration | None = None
    rate: float | None = None
    arrival_cv: float = 1.0
    replicas: int = 1
    lens: Sequence[int] = ()  # of prompts, equally likely, where they are not all of `n_in`

    @property
    def source(self) -> str:
        return self.model.cost.source

    @property
    def traffic(self) -> Traffic:
        """On one replica."""
        return self.model.under(self.n_in, self.n_out, lens=self.lens)

    def limits(self) -> list[dict[str, Any]]:
        return limit_rows(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            slots=self.slots,
            n_in=self.n_in,
            n_out=self.n_out,
        )

    @property
    def l_each(self) -> int:
        """Requests that one replica runs at once."""
        return max(int(binding(self.limits())["allows"]), 1)

    @property
    def l_max(self) -> int:
        return self.replicas * int(binding(self.limits())["allows"])

    def closed(self) -> list[Prediction]:
        def one(b: int) -> Prediction:
            return self.traffic.closed(b, self.l_each)

        return [closed_over(self.replicas, b, one) for b in ladder(self.replicas * self.l_each)]

    def open_at(self, rate: float) -> Prediction | None:
        """None where the queue would grow for ever."""
        return open_over(self.replicas, rate, self.traffic, self.l_each, self.arrival_cv)

    @property
    def rate_max(self) -> float:
        return self.replicas * self.traffic.throughput(self.l_each)

    def is_covered(self, concurrency: float) -> bool:
        """Whether the calibration reaches so far."""
        if self.calibration is None:
            return True
        b = concurrency / self.replicas
        context = self.n_in + self.n_out / 2
        return self.calibration.covers(b, b * context, self.n_in)


def as_json(plan: Plan) -> dict[str, Any]:
    rows = plan.limits()
    least = binding(rows)
    value: dict[str, Any] = {
        "model": plan.model_name,
        "hardware": asdict(plan.hardware),
        "source": plan.source,
        "n_in": plan.n_in,
        "n_out": plan.n_out,
        "num_gpus": plan.hardware.count,
        "replicas": plan.replicas,
        "limits": rows,
        "l_max": plan.l_max,
        "binds": least["resource"],
        "lambda_max": plan.rate_max,
        "sigma": plan.model.serial_share(plan.n_in, plan.n_out),
        "points": [_point(plan, p) for p in plan.closed()],
        "errors": plan.calibration.errors if plan.calibration else None,
        "cost": asdict(plan.model.cost),
    }
    if plan.rate is not None:
        found = plan.open_at(plan.rate)
        value["open"] = None if found is None else _point(plan, found)
    return value


def _point(plan: Plan, p: Prediction) -> dict[str, Any]:
    return {
        "concurrency": p.concurrency,
        "requests_per_s": p.requests_per_s,
        "output_tokens_per_s": p.output_tokens_per_s,
        "ttft_ms": p.ttft_s * 1e3,
        "tpot_ms": ms(p.tpot_s),
        "e2e_ms": p.e2e_s * 1e3,
        "wait_ms": p.wait_s * 1e3,
        "wait_p99_ms": p.wait_p99_s * 1e3,
        "bound": p.bound,
        "covered": plan.is_covered(p.concurrency),
    }


def lines(plan: Plan, *, explain: bool) -> list[str]:
    model, hardware = plan.model, plan.hardware
    place = (
        f"{plan.replicas} replicas on {hardware.name} each" if plan.replicas > 1 else hardware.name
    )
    found = [
        f"{plan.model_name} on {place} ({hardware.source}: "
        f"{_rounded(hardware.bandwidth / 1e9)} GB/s, {_rounded(hardware.flops / 1e12)} TFLOP/s) · "
        f"{plan.n_in} tokens in, {plan.n_out} out · predictor: {plan.source}",
        "",
        *_limit_lines(plan),
        "",
        *_closed_lines(plan),
    ]
    step, prefill = model.decode(1, plan.n_in), model.prefill(plan.n_in)
    floor = model.decode_floor(hardware, 1, plan.n_in)
    prefill_floor = model.prefill_floor(hardware, plan.n_in)
    found += [
        "",
        f"floors    decode step {number(floor * 1e3)} of {number(step * 1e3)} ms "
        f"({100 * floor / step:.0f} %) · prefill {number(prefill_floor * 1e3)} of "
        f"{number(prefill * 1e3)} ms ({100 * prefill_floor / prefill:.0f} %)",
    ]
    sigma = model.serial_share(plan.n_in, plan.n_out)
    if sigma > 0:
        found.append(f"amdahl    σ = {number(sigma)}: batching ceiling ×{number(1 / sigma)}")
    if plan.calibration is None:
        found.append(
            "note      a datasheet knows no launch or scheduling cost: small models are slower "
            "than this; 'nvcli bench latency' measures it"
        )
        if hardware.count > 1:
            link, cost = link_of(hardware.name), plan.model.cost
            each = f"{link.latency_s * 1e6:.0f} us an all-reduce"
            if cost.many_rows_more:
                each += f" ({link.short_s * 1e6:.0f} up to {cost.few_rows} rows)"
            found.append(
                f"note      assumes {each} and links of {link.bandwidth / 1e9:.0f} GB/s, "
                "by the kind of GPU"
            )
    if plan.calibration is not None and plan.calibration.errors:
        worst = max(plan.calibration.errors.items(), key=lambda item: abs(item[1]))
        mean = math.fsum(map(abs, plan.calibration.errors.values()))
        mean /= len(plan.calibration.errors)
        found.append(
            f"error     leave-one-out, mean {100 * mean:.0f} %, worst {100 * worst[1]:+.0f} % "
            f"({worst[0]})"
        )
        found += [f"note      {text}" for text in plan.calibration.notes]
    if plan.rate is not None:
        found += ["", *_open_lines(plan, plan.rate)]
    if explain:
        found += ["", *explanation(plan)]
    return found


def _closed_lines(plan: Plan) -> list[str]:
    header = (
        f"{'c':>6}{'req/s':>10}{'tok/s':>10}{'ttft ms':>10}{'tpot ms':>10}{'e2e s':>9}  bound by"
    )
    rows = []
    for p in plan.closed():
        mark = "" if plan.is_covered(p.concurrency) else "  beyond the calibration"
        line = (
            f"{p.concurrency:>6.0f}{number(p.requests_per_s):>10}"
            f"{number(p.output_tokens_per_s):>10}{number(ms(p.ttft_s)):>10}{number(ms(p.tpot_s)):>10}"
            f"{number(p.e2e_s):>9}  {p.bound}{mark}"
        )
        values = [
            *(("req/s", number(p.requests_per_s)), ("tok/s", number(p.output_tokens_per_s))),
            *(("ttft ms", number(ms(p.ttft_s))), ("tpot ms", number(ms(p.tpot_s)))),
            *(("e2e s", number(p.e2e_s)), ("bound by", f"{p.bound}{mark}")),
        ]
        rows.append((line, f"c = {p.concurrency:.0f}", values))
    return table(header, rows)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _limit_lines(plan: Plan) -> list[str]:
    rows = plan.limits()
    least = binding(rows)
    header = f"{'resource':24}{'a request needs':>20}{'there is':>18}{'allows':>10}"
    found = []
    for row in rows:
        allows = row["allows"] if row["allows"] is not None else row["soft"]
        note = "  binds" if row is least else "" if row["allows"] is not None else "  soft"
        line = f"{row['resource']:24}{row['need']:>20}{row['limit']:>18}{allows:>10,}{note}"
        values = [
            *(("a request needs", row["need"]), ("there is", row["limit"])),
            ("allows", f"{allows:,}{note}"),
        ]
        found.append((line, row["resource"], values))
    text = table(header, found)
    text.append(
        f"L_max {plan.l_max:,} by {least['resource']} · "
        f"λ_max {number(plan.rate_max)} requests/s there"
    )
    return text


def _open_lines(plan: Plan, rate: float) -> list[str]:
    """The planning answer at a rate."""
    found = plan.open_at(rate)
    if found is None:
        return [
            f"λ = {rate:g}/s is beyond λ_max = {number(plan.rate_max)}/s: the queue would grow "
            "for ever. Fewer requests, shorter answers, or more machines."
        ]
    load = found.concurrency
    slots = safe_slots(load / plan.replicas)
    rows = {row["resource"]: row for row in plan.limits()}
    each = " each" if plan.replicas > 1 else ""
    lines = [
        f"for λ = {rate:g}/s and a predicted W = {number(found.e2e_s)} s you hold "
        f"{number(load)} requests (Little); KV allows {rows['KV, on average']['allows']:,}{each}; "
        f"set --max-num-seqs to at least {slots} (L + 3√L; a captured size: {graph_size(slots)})",
        f"ttft {number(found.ttft_s * 1e3)} ms · tpot {number(ms(found.tpot_s))} ms · utilisation "
        f"{100 * rate / plan.rate_max:.0f} %",
    ]
    if found.wait_s > 1e-6:
        lines.append(
            f"wait for a slot: mean {number(found.wait_s * 1e3)} ms, p99 "
            f"{number(found.wait_p99_s * 1e3)} ms (upper estimates near saturation)"
        )
    if not plan.is_covered(max(load / plan.replicas, 1)):
        lines.append("beyond twice of what was calibrated: these numbers are not to be relied on")
    return lines


def explanation(plan: Plan) -> list[str]:
    """The café sentence with this machine's numbers."""
    rate = plan.rate if plan.rate is not None else plan.rate_max / 2
    queue = plan.open_at(rate)
    if queue is None:
        return ["a café that more guests enter than leave never has a steady number of guests"]
    wait = queue.e2e_s
    return [
        "A café that 10 guests an hour enter, each for half an hour, holds 10 × 0.5 = 5 guests on "
        "average.",
        f"This server, which {number(rate)} requests a second enter, each for {number(wait)} s, "
        f"holds {number(rate)} × {number(wait)} = {number(rate * wait)} requests on average.",
        f"It has seats for {plan.l_max:,} ({binding(plan.limits())['resource']}). With all of them "
        f"taken it serves {number(plan.rate_max)} requests a second, and no more guests come in "
        "than go out: the rest waits at the door.",
    ]
