"""The work lists of attention: what `attention_plan` makes of rows, against plain Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nvcli.kernels import tuned
from nvcli.kernels.cuts import ATTENTION, Split
from tests.kernels.triton_testing import needs_triton, run_in_interpreter

# keys of rows of one token, of which 0 is padding; programs an SM, KV heads, SMs
CASES: dict[str, tuple[list[int], Split, int, int]] = {
    "one row": ([1000], Split(4, 8), 8, 12),
    "one row of one key": ([1], Split(4, 8), 8, 12),
    "more programs than tiles": ([300, 200, 190], Split(16, 16), 1, 12),
    "as many rows as items": ([64 * n for n in range(1, 13)], Split(1, 1), 1, 12),
    "one row more than items": ([64 * n for n in range(1, 14)], Split(1, 1), 1, 12),
    "one item more than rows": ([64 * n for n in range(1, 12)], Split(1, 1), 1, 12),
    "even": ([640] * 10, Split(2, 6), 2, 12),
    "just even": ([384] * 4 + [512], Split(2, 6), 2, 12),
    "just uneven": ([384] * 4 + [513], Split(2, 6), 2, 12),
    "even but for padding": ([640] * 5 + [0] * 11, Split(2, 6), 2, 12),
    "one long among many": ([70] * 30 + [20_000], Split(2, 6), 2, 12),
    "uneven": ([100 + 37 * n % 900 for n in range(40)], Split(2, 9), 2, 12),
    "padding alone": ([0] * 12, Split(2, 6), 2, 12),
}
TILE = 64


def tiles_of(keys: list[int]) -> list[int]:
    return [max(-(-n // TILE), 1) for n in keys]


def items_in_chunks_of(chunk: int, keys: list[int]) -> int:
    return sum(-(-n // chunk) for n in tiles_of(keys))


def check(
    keys: list[int],
    split: Split,
    kv_heads: int,
    sms: int,
    device: str = "cpu",
    *,
    prompts: tuple[int, ...] = (),
) -> None:
    """prompts: tokens of rows that stand before those of one token."""
    from nvcli.kernels.attention_plan import KEYS_PER_TILE, SORTED_FROM, make_plan

    assert KEYS_PER_TILE == TILE
    lens = torch.tensor([1 + n for n in prompts] + keys, dtype=torch.int32)
    query_lens = torch.tensor([*prompts, *[1] * len(keys)])
    starts = torch.cat([torch.zeros(1), query_lens.cumsum(0)]).int()
    num_rows, ask = len(lens), tuned.attention
    slots = torch.arange(num_rows).flip(0)
    tuned.attention = lambda device: replace(ATTENTION, splits=((1, split),))
    try:
        plan = make_plan(
            *(tensor.to(device) for tensor in (starts, lens, slots)),
            num_tokens=int(starts[-1]),
            num_kv_heads=kv_heads,
            num_sms=sms,
            tokens_per_tile=16,
            has_decode=True,
            has_prefill=bool(prompts),
        )
    finally:
        tuned.attention = ask

    # 1. As few tiles a chunk as the programs allow, and no item beyond the list.
    some = [n for n in keys if n]
    is_even = not some or max(tiles_of(some)) * len(some) <= 1.25 * sum(tiles_of(some))
    most = max(num_rows, sms * (split.even if is_even else split.uneven) // kv_heads)
    chunk = next(c for c in range(1, 1 << 20) if items_in_chunks_of(c, keys) <= most)
    num_items = int(plan.sizes[0])
    assert num_items == items_in_chunks_of(chunk, keys) <= plan.items.shape[0]

    # 2. Each row's keys once, in order, in splits that differ by one tile at most.
    items = plan.items[:num_items].tolist()
    rows = list(dict.fromkeys(item[0] for item in items))
    assert sorted(rows) == list(range(len(prompts), num_rows))
    largest = []
    for row in rows:
        own = [item for item in items if item[0] == row]
        at, sizes = 0, []
        for i, (_, slot, first, end, split_index, splits, token, _) in enumerate(own):
            assert (slot, split_index, splits) == (int(slots[row]), i, len(own))
            assert token == int(starts[row])
            assert first == at
            assert first % TILE == 0
            at = end
            sizes.append(max(-(-(end - first) // TILE), 1))
        assert at == lens[row]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= chunk
        largest.append(max(sizes))
    if num_rows >= SORTED_FROM:
        assert largest == sorted(largest, reverse=True), "the largest begin first"
    else:
        assert rows == sorted(rows)


def check_all_in_the_interpreter() -> None:
    for case in CASES.values():
        check(*case)
    check(*CASES["uneven"], prompts=(20, 2))
    check([], Split(4, 8), 2, 12, prompts=(3, 40))


@needs_triton
@pytest.mark.interpret
def test_rows_are_cut_as_the_programs_allow() -> None:
    run_in_interpreter("tests.kernels.test_attention_plan", "check_all_in_the_interpreter")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_on_cuda(case: tuple[list[int], Split, int, int]) -> None:
    check(*case, "cuda")


@needs_triton
@pytest.mark.torch
def test_bound_on_tiles_holds() -> None:
    """The grid is a bound: no mix of lengths makes more tiles."""
    from nvcli.kernels.attention_plan import max_tiles

    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        num_rows = int(torch.randint(1, 300, (), generator=generator))
        tokens = torch.randint(0, 50, (num_rows,), generator=generator)
        tiles = int(((tokens + 24) // 25)[tokens > 1].sum())
        assert tiles <= max_tiles(num_rows, int(tokens.sum()), 25)
