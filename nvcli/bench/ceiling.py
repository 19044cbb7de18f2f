"""What the load client can do at most: the null engine, a stub that answers at once.

Client and stub share this machine, so it is what the client can do at least.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvcli.bench.children import stub_server
from nvcli.bench.load_run import Load, run_on_stub


@dataclass(frozen=True, slots=True)
class Ceiling:
    ceiling_requests_per_s: float  # of one token each
    cpu_s_per_token: float | None  # beyond the first of a stream


def client_ceiling(duration_s: float = 1.0, concurrency: int = 16) -> Ceiling:
    """Half of the time with answers of one token, half with streams of 64."""
    half = duration_s / 2
    rate, cpu_of_one = _drive(1, half, concurrency)
    _, cpu_of_many = _drive(64, half, concurrency)
    return Ceiling(rate, max(cpu_of_many - cpu_of_one, 0.0) / 63 or None)


def _drive(num_tokens: int, duration_s: float, concurrency: int) -> tuple[float, float]:
    """(requests a second, CPU seconds of each)."""
    load = Load(concurrency=concurrency, duration_s=duration_s, fills=False)
    # tokens a millisecond apart, as they come from an engine: at once they would come in one read
    with stub_server(0, 0, 1.0 if num_tokens > 1 else 0) as url:
        result = run_on_stub(url, load, in_len=8, out_len=num_tokens)
    number = max(len(result.records), 1)
    return number / result.wall_s, result.cpu_s / number
