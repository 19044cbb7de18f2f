"""What the benchmark of the all-reduce says about its numbers."""

from __future__ import annotations

from typing import Any

from benchmarks.all_reduce import COLUMNS, ROWS, table


def times(ours: float, *, is_equal: bool = True) -> dict[str, Any]:
    """NCCL takes 14 us whatever the rows, ours so much a row and 4 more."""
    return {"sums": "ours"} | {
        str(n): {
            "bytes": 2 * n * COLUMNS,
            "library": 12.0,
            "ours": 3.0 + ours * n,
            "library_norm": 14.0,
            "ours_norm": 4.0 + ours * n,
            "is_equal": is_equal,
        }
        for n in ROWS
    }


def test_the_limit_is_the_last_number_of_rows_where_ours_is_ahead() -> None:
    lines, is_right = table(2, times(0.1))
    assert is_right
    assert len(lines) == len(ROWS) + 3
    assert lines[-1].endswith(f"up to 96 rows: SHORT_BYTES = {96 * COLUMNS * 4}")
    assert table(4, times(0.1))[0][-1].endswith(f"SHORT_BYTES = {3 * 96 * COLUMNS * 4}")
    assert table(2, times(20.0))[0][-1].endswith("up to 0 rows: SHORT_BYTES = 0")


def test_other_bits_than_nccls_are_wrong_between_two() -> None:
    lines, is_right = table(2, times(0.1, is_equal=False))
    assert not is_right
    assert lines[-1].startswith("ours has other bits than NCCL's at [1, 2,")
    assert table(4, times(0.1, is_equal=False))[1]  # NCCL rounds after each part


def test_without_ours_there_is_nothing_to_compare() -> None:
    only = {"sums": "gloo"} | {str(n): {"bytes": n, "library": 1.0} for n in ROWS}
    lines, is_right = table(2, only)
    assert is_right
    assert len(lines) == len(ROWS) + 2
