"""`bench serve --self-test`: the client against a timetable that is known to a millisecond.

The stub sends the first token of request i at ttft + (i mod 100) step and one token each gap. What
the client must find follows on paper; what it finds is printed beside it, with its own ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvcli.bench import metrics
from nvcli.bench.ceiling import client_ceiling
from nvcli.bench.children import stub_server
from nvcli.bench.load_run import Load, run_on_stub
from nvcli.bench.stub import CYCLE, Timetable
from nvcli.bench.text import number, table

TABLE = Timetable(ttft=20.0, step=0.5, gap=5.0)
NUM_REQUESTS, NUM_TOKENS, RATE = 300, 8, 50.0
TOLERANCE_MS, TOLERANCE = 1.5, 0.03


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    expected_ms: float
    found_ms: float | None
    noise_ms: float = 0.0  # how late this machine wakes a process up, p99

    @property
    def passes(self) -> bool:
        if self.found_ms is None:
            return False
        allowed = TOLERANCE_MS + TOLERANCE * self.expected_ms + self.noise_ms
        return abs(self.found_ms - self.expected_ms) <= allowed


@dataclass(frozen=True, slots=True)
class SelfTest:
    checks: list[Check]
    late_p99_ms: float
    ceiling: float

    @property
    def passes(self) -> bool:
        return all(check.passes for check in self.checks) and self.late_p99_ms <= 5

    def lines(self) -> list[str]:
        lines = [
            f"{NUM_REQUESTS} requests at {RATE:g}/s, {NUM_TOKENS} tokens each, from a stub with a "
            "known timetable",
        ]
        rows = [
            (c.name, f"{c.expected_ms:.3f}", number(c.found_ms, 5), "" if c.passes else "  DIFFERS")
            for c in self.checks
        ]
        rows.append(("late p99", "0.000", number(self.late_p99_ms), ""))
        lines += table(
            f"{'ms':16}{'timetable':>12}{'found':>12}",
            [
                (
                    f"{name:16}{expected:>12}{found:>12}{mark}",
                    f"{name} ms",
                    [("timetable", expected), ("found", f"{found}{mark}")],
                )
                for name, expected, found, mark in rows
            ],
        )
        lines.append(
            f"allowed: {TOLERANCE_MS:g} ms, {TOLERANCE:.0%} and the lateness p99 above; "
            "a client later than 5 ms fails"
        )
        lines.append(f"the client makes at least {self.ceiling:,.0f} requests/s on this machine")
        return lines


def run_self_test() -> SelfTest:
    assert NUM_REQUESTS % CYCLE == 0, "whole cycles"
    load = Load(times=[(i + 1) / RATE for i in range(NUM_REQUESTS)])
    with stub_server(TABLE.ttft, TABLE.step, TABLE.gap) as url:
        records = run_on_stub(url, load, in_len=8, out_len=NUM_TOKENS).records
    pools = metrics.pool(metrics.latencies(r) for r in records)
    firsts = sorted(TABLE.first(i) for i in range(NUM_REQUESTS))
    decode = (NUM_TOKENS - 1) * TABLE.gap
    late = metrics.percentile(pools["late"], 0.99) * 1e3
    checks = []
    for name, p in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        want = metrics.percentile(firsts, p)
        for metric, expected in (("ttft", want), ("e2e", want + decode)):
            found = metrics.stated_percentile(pools[metric], p)
            checks.append(Check(f"{metric} {name}", expected, metrics.ms(found), late))
    tpot = metrics.finite_mean(pools["tpot"])
    checks.append(Check("tpot mean", TABLE.gap, metrics.ms(tpot)))
    return SelfTest(checks, late, client_ceiling().ceiling_requests_per_s)
