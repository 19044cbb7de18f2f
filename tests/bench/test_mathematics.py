"""Hand-worked cases of the mathematics: every expected number can be checked on paper."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from nvcli.bench import fit, little, metrics, queueing, stats
from nvcli.bench.metrics import latencies, percentile, stated_percentile
from nvcli.bench.record import RequestRecord
from nvcli.errors import UsageError

MS = 1_000_000


def request(
    s_star: float = 0, s: float | None = None, chunks: list[tuple[float, int]] | None = None, **more
) -> RequestRecord:
    """Times in milliseconds."""
    pairs = [(int(t * MS), k) for t, k in (chunks if chunks is not None else [(10, 1)])]
    end = more.pop("end", pairs[-1][0] / MS if pairs else s_star)
    return RequestRecord(
        id="r",
        s_star_ns=int(s_star * MS),
        s_ns=int((s_star if s is None else s) * MS),
        end_ns=int(end * MS),
        chunks=pairs,
        **more,
    )


# --- one request ---------------------------------------------------------------------------------


def test_latencies_start_at_the_intended_send() -> None:
    value = latencies(request(s_star=100, s=130, chunks=[(150, 1), (160, 1), (190, 2), (200, 1)]))
    assert value.ttft == pytest.approx(0.050)
    assert value.ttft_service == pytest.approx(0.020)
    assert value.e2e == pytest.approx(0.100)
    assert value.e2e_service == pytest.approx(0.070)
    assert value.late == pytest.approx(0.030)
    assert value.tpot == pytest.approx(0.050 / 4)  # 50 ms for the four tokens after the first chunk
    assert value.itl == pytest.approx((0.010, 0.015, 0.015, 0.010))
    assert value.stall == pytest.approx(0.030)  # spreading would say 15 ms


def test_first_chunk_without_a_token_does_not_count() -> None:
    assert latencies(request(chunks=[(5, 0), (20, 1)])).ttft == pytest.approx(0.020)


def test_tpot_of_one_token_does_not_exist_and_passes_a_limit() -> None:
    value = latencies(request(chunks=[(10, 1)]))
    assert value.tpot is None
    assert value.stall is None
    assert metrics.meets(value, {"tpot": 0.001})
    assert latencies(request(chunks=[(10, 3)])).tpot is None  # all in the first chunk


def test_tpot_counts_the_engine_s_tokens_not_the_chunks() -> None:
    value = latencies(request(chunks=[(10, 1), (20, 1), (30, 1)], n_out=5))
    assert value.tpot == pytest.approx(0.020 / 4)


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_failure_is_infinite(status: str) -> None:
    value = latencies(request(status=status))
    assert value.ttft == value.e2e == math.inf
    assert value.tpot is None
    assert not metrics.meets(value, {})


def test_unfinished_request_says_nothing() -> None:
    value = latencies(request(status="unfinished"))
    assert value.ttft is value.e2e is None
    assert not metrics.meets(value, {})


def test_coordinated_omission() -> None:
    """One stall of 1 s in a schedule of 10 ms: a closed client sees 1 slow request of 100, and the
    schedule 100 of them, waiting 1,000, 990, ... 10 ms."""
    stalled = [request(s_star=10 * i, s=1000, chunks=[(1000, 1)]) for i in range(100)]
    e2e = sorted(latencies(r).e2e or 0 for r in stalled)
    service = sorted(latencies(r).e2e_service or 0 for r in stalled)
    assert percentile(e2e, 0.5) == pytest.approx(0.500)
    assert percentile(service, 0.5) == 0


# --- percentiles ---------------------------------------------------------------------------------


def test_nearest_rank() -> None:
    values = [15.0, 20.0, 35.0, 40.0, 50.0]
    expected = {0.05: 15, 0.3: 20, 0.4: 20, 0.5: 35, 1.0: 50}
    assert {p: percentile(values, p) for p in expected} == expected
    assert percentile(list(map(float, range(1, 101))), 0.99) == 99
    assert percentile([1.0] * 98 + [math.inf] * 2, 0.99) == math.inf


def test_linear_percentile_agrees_with_numpy_and_survives_infinity() -> None:
    values = sorted(random.Random(1).random() for _ in range(57))
    for p in (0.5, 0.9, 0.99):
        assert metrics.linear_percentile(values, p) == pytest.approx(np.percentile(values, 100 * p))
    assert metrics.linear_percentile([1.0, math.inf], 0.5) == math.inf
    assert metrics.linear_percentile([1.0], 0.99) == 1.0


def test_percentiles_only_where_the_sample_allows() -> None:
    assert [metrics.min_samples(p) for p in (0.5, 0.9, 0.95, 0.99, 0.999)] == [5, 29, 59, 299, 2995]
    assert stated_percentile([1.0] * 298, 0.99) is None
    assert stated_percentile([1.0] * 299, 0.99) == 1.0
    assert stated_percentile([], 0.5) is None


def test_order_interval_has_binomial_ranks() -> None:
    # N = 1,000, p50: q(2.5 %) = 469, q(97.5 %) + 1 = 532 of Binomial(1000, 1/2)
    values = [float(i) for i in range(1, 1001)]
    assert stats.order_interval(values, 0.5) == (469, 532)
    # p99 of 100: Binomial(100, 0.99) has q(97.5 %) = 100, so no sample bounds it from above
    assert stats.order_interval(values[:100], 0.99) == (97, None)
    assert stats.order_interval(values[:3], 0.01) == (None, 2)
    assert stats.order_interval([], 0.5) == (None, None)


def test_order_interval_covers() -> None:
    rng = np.random.default_rng(3)
    true = -math.log(0.1)  # p90 of an exponential
    hits = 0
    for _ in range(400):
        low, high = stats.order_interval(sorted(rng.exponential(size=200)), 0.9)
        hits += low is not None and high is not None and low <= true <= high
    assert hits >= 0.93 * 400


def test_tail_chance() -> None:
    assert metrics.tail_chance(256) == pytest.approx(1 - 0.99**256)  # 92 %
    assert round(100 * metrics.tail_chance(256)) == 92


# --- limits --------------------------------------------------------------------------------------


def test_slo_text() -> None:
    assert metrics.parse_slo("ttft=300ms, tpot=25ms,e2e=5s,stall=1") == {
        "ttft": 0.3,
        "tpot": 0.025,
        "e2e": 5.0,
        "stall": 1.0,
    }
    for bad in ("ttfb=1s", "ttft", "ttft=soon", "ttft=nan", "ttft=-1s", "ttft=inf", ""):
        with pytest.raises(UsageError):
            metrics.parse_slo(bad)


def test_token_deadlines_see_what_delaying_tokens_hides() -> None:
    """Deadlines at 100, 110, 120, 130 ms; the third token comes at 125."""
    late = request(chunks=[(90, 1), (110, 1), (125, 1), (130, 1)])
    assert metrics.attainment([late], ttft=0.1, tpot=0.01) == pytest.approx(3 / 4)
    failed = request(status="error", chunks=[])
    assert metrics.attainment([late, failed], ttft=0.1, tpot=0.01) == pytest.approx(3 / 5)
    assert metrics.attainment([], ttft=0.1, tpot=0.01) is None


# --- Little --------------------------------------------------------------------------------------

SPANS = [(0, 4), (1, 3), (2, 6), (6, 8)]  # N(t): 1 2 3 2 1 1 1 1


def test_in_flight_is_an_exact_sweep_line() -> None:
    flight = little.InFlight.of(SPANS)
    assert [flight.at(t) for t in range(9)] == [1, 2, 3, 2, 1, 1, 1, 1, 0]
    assert flight.peak == 3
    assert flight.integral(0, 8) == 4 + 2 + 4 + 2
    assert flight.integral(1, 3) == 2 + 3
    assert flight.integral(-5, 1) == 1
    assert flight.integral(7, 20) == 1
    assert flight.series(0, 8, 4) == [1.5, 2.5, 1.0, 1.0]
    assert little.InFlight.of([]).peak == 0


def test_identity_is_exact_and_finds_a_mixed_clock() -> None:
    assert little.identity_error(SPANS) == 0
    assert little.identity_error([]) == 0
    assert little.identity_error([(0, 4), (10, 3)]) > little.EXACT


def test_law_leaves_out_ends_at_the_left_edge() -> None:
    """Over (3, 8]: the end at 3 is out; N = 2 1 1 1 1, so L = 6/5; ends at 4, 6, 8."""
    second = 10**9
    found = little.law([(a * second, b * second) for a, b in SPANS], 3 * second, 8 * second)
    assert found.num_ended == 3
    assert (found.L, found.rate) == pytest.approx((6 / 5, 3 / 5))
    assert (found.W or 0) == pytest.approx((4 + 4 + 2) / 3)
    assert found.residual == pytest.approx((1.2 - 2.0) / 1.2)
    assert found.verdict == "not steady"


def test_law_holds_in_a_steady_closed_loop() -> None:
    """Four clients of 1 s each, shifted by 250 ms: L = 4, lambda = 4, W = 1."""
    second = 10**9
    spans = [
        (int((i + k / 4) * second), int((i + 1 + k / 4) * second))
        for k in range(4)
        for i in range(20)
    ]
    found = little.law(spans, 2 * second, 18 * second)
    assert (found.L, found.rate, found.W) == (4, 4, 1)
    assert found.verdict == "good"
    assert little.outside_s(found, server_mean=3.8) == pytest.approx(0.05)


def test_cohort_is_seen() -> None:
    second, rng = 10**9, random.Random(2)
    lock_step = [(r + 1) * second + i for r in range(10) for i in range(64)]
    mixed = sorted(int(rng.random() * 10 * second) for _ in range(640))
    assert little.is_cohort(lock_step, 64, 1.0)
    assert not little.is_cohort(mixed, 64, 1.0)
    assert not little.is_cohort(lock_step[:10], 64, 1.0)


def test_kv_tokens() -> None:
    # 2/s of 100 in, 11 out at 10 ms: 2 (100 x 1 + 0.01 x 11 x 10 / 2)
    assert little.kv_tokens(2, 100, 11, 1.0, 0.01) == pytest.approx(2 * 100.55)


# --- steady state --------------------------------------------------------------------------------


def test_warm_up_cut() -> None:
    rng = random.Random(4)
    steady = [10 + rng.random() for _ in range(200)]
    warm = [30 - i for i in range(20)]
    assert 20 <= stats.mser5([*warm, *steady]) <= 30
    assert stats.mser5([5.0] * 100) == 0  # nothing to gain: keep all
    assert stats.mser5([1.0] * 10) == 0
    assert stats.mser5([float(i) for i in range(100)]) <= 50


def test_slope() -> None:
    times = [float(i) for i in range(50)]
    rng = random.Random(5)
    assert stats.slope_is_up(times, [t + rng.random() for t in times])
    assert not stats.slope_is_up(times, [rng.random() for _ in times])
    assert not stats.slope_is_up(times, [-t for t in times])
    assert not stats.slope_is_up(times, [1.0] * 50)


def test_batch_means_put_an_end_into_the_batch_it_closes() -> None:
    rates = stats.batch_means([0.0, 1.0, 1.5, 2.0, 4.0], [1, 1, 1, 2, 8], 0.0, 4.0, 2)
    assert rates == [2.0, 4.0]  # (1 + 1 + 2) / 2 s, 8 / 2 s; the one at 0 is out


# --- comparing -----------------------------------------------------------------------------------


def test_student_interval() -> None:
    low, high = stats.mean_interval([9.0, 10.0, 11.0]) or (0, 0)
    assert (10 - low, high - 10) == pytest.approx((2.4841, 2.4841), abs=1e-3)  # 4.3027 / sqrt(3)
    assert stats.mean_interval([1.0, 2.0]) is None


def test_holm() -> None:
    assert stats.holm([0.01, 0.04, None, 0.03]) == pytest.approx([0.03, 0.06, None, 0.06])


def test_location_tests() -> None:
    a, b = [float(i) for i in range(20)], [float(i) + 100 for i in range(20)]
    assert (stats.mann_whitney(a, b) or 1) < 1e-6
    assert stats.mann_whitney([1.0] * 5, [1.0] * 5) == 1.0
    assert stats.mann_whitney([1.0], b) is None
    assert stats.hodges_lehmann(a, b) == 100
    assert stats.hodges_lehmann([1.0, math.inf], [3.0]) == 2
    assert stats.hodges_lehmann([], b) is None


def test_welch_and_bootstrap_give_the_change() -> None:
    change, low, high, p = stats.welch([10.0, 11.0, 9.0], [20.0, 21.0, 19.0]) or (0, 0, 0, 1)
    assert change == pytest.approx(1.0)
    assert low < 1.0 < high
    assert p < 0.01
    rng = np.random.default_rng(6)
    a, b = rng.normal(10, 1, 500), rng.normal(11, 1, 500)
    change, low, high = stats.bootstrap_ratio([a], [b], lambda x: float(x.mean())) or (0, 0, 0)
    assert low < 0.1 < high
    assert low < change < high
    assert stats.bootstrap_ratio([a], [np.array([math.inf])], lambda x: float(x.max())) is None


# --- fits and queues -----------------------------------------------------------------------------


def test_amdahl_fit_recovers_its_own_curve() -> None:
    points = [(n, 0.833 * n / (1 + 0.0316 * (n - 1))) for n in (1, 2, 4, 8, 16, 32, 64)]
    found = fit.fit_scaling(points)
    assert found is not None
    assert found.x1 == pytest.approx(0.833)
    assert found.sigma == pytest.approx(0.0316)
    assert found.kappa == pytest.approx(0, abs=1e-9)
    assert found.r2 == pytest.approx(1)
    assert found.ceiling == pytest.approx(0.833 / 0.0316)
    knee = found.knee or 0
    assert knee == pytest.approx(30.65, abs=0.01)
    assert found(knee) == pytest.approx((found.ceiling or 0) / 2)  # at the knee X is half of X_inf


def test_usl_fit_finds_the_peak() -> None:
    truth = fit.Scaling(2.0, 0.05, 0.001)
    found = fit.fit_scaling([(n, truth(n)) for n in (1, 2, 4, 8, 16, 32, 64, 128)])
    assert found is not None
    assert found.kappa == pytest.approx(0.001)
    assert found.peak == pytest.approx(math.sqrt(0.95 / 0.001))
    low, high = found.kappa_interval or (1, 0)
    assert low <= 0.001 + 1e-12
    assert high >= 0.001 - 1e-12


def test_fit_refuses_what_it_cannot_know() -> None:
    assert fit.fit_scaling([(1, 2.0)]) is None
    assert fit.fit_scaling([(4, 2.0), (4, 2.1)]) is None
    two = fit.fit_scaling([(1, 1.0), (2, 2.0)])
    assert two is not None
    assert two.knee is two.peak is two.ceiling is None  # perfect scaling has no ceiling


def test_textbook_queues() -> None:
    one = queueing.birth_death(0.5, lambda n: 1.0, 1)  # M/M/1 at rho = 1/2
    assert one is not None
    assert (one.L, one.W, one.p_wait, one.W_q) == pytest.approx((1.0, 2.0, 0.5, 1.0))
    two = queueing.birth_death(1.5, float, 2)  # M/M/2, Erlang C of a = 1.5: 9/14
    assert two is not None
    assert (two.p_wait, two.W_q) == pytest.approx((9 / 14, 9 / 7))
    sharing = queueing.birth_death(0.5, lambda n: 1.0, 100)  # one server for all: W = 1 / (1 - rho)
    assert sharing is not None
    assert (sharing.L, sharing.W, sharing.W_q) == pytest.approx((1.0, 2.0, 0.0))
    endless = queueing.birth_death(3.0, lambda n: n / 2.0, 100)  # a server each: L = lambda S
    assert endless is not None
    assert pytest.approx((6.0, 2.0)) == (endless.L, endless.W)
    assert queueing.birth_death(1.0, lambda n: 1.0, 1) is None
    assert queueing.birth_death(2.0, float, 2) is None
    assert queueing.md1_wait(0.5, 1.0) == 0.5
    assert queueing.md1_wait(1.0, 1.0) is None
    assert queueing.burstiness(1, 1) == 1
    assert queueing.wait_p99(0.005, 10, 5) == 0
    assert queueing.wait_p99(0.5, 10, 5) == pytest.approx(math.log(50) / 5)


@pytest.mark.parametrize("load", [0.3, 1.5, 3.9])
def test_birth_death_contains_erlang_c(load: float) -> None:
    """Four servers of unit rate; Erlang's C from its sums."""
    terms = [load**n / math.factorial(n) for n in range(4)]
    full = load**4 / math.factorial(4) * 4 / (4 - load)
    p_wait = full / (sum(terms) + full)
    chain = queueing.birth_death(load, float, 4)
    assert chain is not None
    wait = p_wait / (4 - load)
    assert (chain.L, chain.W, chain.p_wait, chain.W_q) == pytest.approx(
        (load * (1 + wait), 1 + wait, p_wait, wait)
    )


def test_birth_death_does_not_overflow_and_refuses_overload() -> None:
    wide = queueing.birth_death(100.0, lambda n: 1.0 * n, 4000)
    assert wide is not None
    assert (wide.L, wide.p_wait) == pytest.approx((100, 0))
    assert queueing.birth_death(4.0, lambda n: float(n), 4) is None


def test_a_factor_between_known_places() -> None:
    from nvcli.bench.fit import nearby

    known = [((0.0, 9.0), 2.0), ((0.0, 99.0), 0.5)]
    assert nearby([], (1.0, 2.0)) == 1
    assert nearby(known, (0.0, 9.0)) == pytest.approx(2)
    assert nearby(known, (0.0, 99.0)) == pytest.approx(0.5)
    # Half-way in the logarithm of 10 and 100, and far away from both: the geometric mean.
    assert nearby(known, (0.0, 10**1.5 - 1)) == pytest.approx(1)
    assert nearby(known, (1e12, 10**1.5 - 1)) == pytest.approx(1)
    # Twice as near, four times the weight: 2^(4/5) 0.5^(1/5).
    assert nearby(known, (0.0, 10 ** (4 / 3) - 1)) == pytest.approx(2 ** (3 / 5))


def test_equal_parts_stand_for_all() -> None:
    from nvcli.bench.stats import equal_parts

    assert equal_parts(list(range(16, 0, -1)), 4) == [2, 6, 10, 14]  # means 2.5, 6.5, ...: even
    assert equal_parts([5], 8) == [5]
    assert equal_parts([7, 3], 8) == [3, 7]
    assert equal_parts([], 8) == []


def test_typical_lengths_keep_the_mean_and_the_spread() -> None:
    from nvcli.bench.workload import Lengths

    assert Lengths.parse("1024").typical == [1024]
    found = Lengths.parse("512:1536").typical
    assert len(found) == 8
    assert sum(found) / 8 == pytest.approx(1024, rel=0.03)
    assert found[0] < 600
    assert found[-1] > 1450
    skewed = Lengths.parse("geometric:200").typical
    assert sum(skewed) / 8 == pytest.approx(200, rel=0.1)
