"""The sampling and prepare kernels against the sampler's own functions and plain loops."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_testing import needs_triton, run_in_interpreter

if TYPE_CHECKING:
    from nvcli.engine.device_state import DeviceState

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1e-3},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 2.0, "top_k": 32, "top_p": 0.3, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 3, "min_p": 0.6},
    {"temperature": 1e-40},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8},
    # without a small top_k: by rejection
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 0.8, "top_p": 0.01},
    {"temperature": 1.2, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "min_p": 0.5},
    {"temperature": 1.0, "top_k": 70},
    {"temperature": 1.5, "top_k": 80, "top_p": 0.6},
    # changed logits
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.7, "top_p": 0.7},
    {"temperature": 0.8, "repetition_penalty": 0.7, "frequency_penalty": -0.5, "top_k": 20},
    {"temperature": 0.0, "logit_bias": {3: 50.0, 7: 49.0}, "bad_token_ids": (3,)},
    {"temperature": 1.0, "allowed_token_ids": (1, 5, 9, 40)},
    {"temperature": 1.0, "allowed_token_ids": (1, 5, 9, 40), "top_k": 3, "top_p": 0.9},
    {"temperature": 0.9, "allowed_token_ids": (5, 9, 40), "top_p": 0.5, "min_p": 0.01},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": (1, 4)},
    {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": (1, 4), "top_k": 4},
    {"temperature": 1.0, "min_tokens": 2, "stop_token_ids": (1, 4)},  # no longer early
    # nothing is left
    {"temperature": 0.0, "allowed_token_ids": (5,), "bad_token_ids": (5,)},
    {"temperature": 1.0, "allowed_token_ids": (5,), "bad_token_ids": (5,)},
    {"temperature": 1.0, "allowed_token_ids": (5,), "bad_token_ids": (5,), "top_k": 5},
    {"temperature": 1.0, "allowed_token_ids": (5,), "bad_token_ids": (5,), "top_p": 0.5},
    {"temperature": 1.0, "allowed_token_ids": (2,), "min_tokens": 9, "min_p": 0.5},
]
PROMPT, OUTPUT, EOS = [7, 0, 3, 61, 20, 5], [9, 9, 40, 3], 2


def make_state(vocab: int, padded: int, num_slots: int, device: str) -> DeviceState:
    from nvcli.engine.device_state import DeviceState
    from nvcli.engine.kv_cache import KVCache, KVCacheSpec

    spec = KVCacheSpec(1, 1, 2, 4, torch.float32)
    return DeviceState(
        max_num_seqs=num_slots,
        max_model_len=64,
        padded_vocab_size=padded,
        kv_cache=KVCache(spec, 8, torch.device(device)),
        device=torch.device(device),
    )


def runner_up_gap(sampler: Any, group: Any, logits: Tensor, position: Tensor) -> float:
    """How far the sample leads what would be next, in the closest of its draws: what rounding may
    turn round.
    """
    argmax, gaps = torch.Tensor.argmax, [math.inf]

    def remember(x: Tensor, *args: Any, **more: Any) -> Tensor:
        best = x[0].topk(min(2, x.shape[1])).values
        if best[-1].isfinite():
            gaps.append(float(best[0] - best[-1]) if len(best) > 1 else math.inf)
        return argmax(x, *args, **more)

    torch.Tensor.argmax = remember  # type: ignore[assignment, method-assign]
    try:
        sampler._sample_group(group, logits, position)
    finally:
        torch.Tensor.argmax = argmax  # type: ignore[method-assign]
    return min(gaps)


def check_sampling(vocab: int, padded: int, dtype: torch.dtype, device: str, seed: int = 0) -> None:
    """Each kind of row in one batch, beside the sampler's token; twice, as counts go on."""
    from nvcli.engine.sampler import Sampler
    from nvcli.engine.step import Row, SlotInit, StepPlan
    from nvcli.engine.step_sampler import StepSampler
    from nvcli.types import SamplingParams

    generator = torch.Generator().manual_seed(seed)
    num_rows = len(KINDS)
    ours, plain = (make_state(vocab, padded, num_rows + 2, device) for _ in range(2))
    order = torch.randperm(num_rows + 2, generator=generator)[:num_rows].tolist()
    inits = [
        SlotInit(
            *(slot, array("i", PROMPT), OUTPUT, SamplingParams(**kind)),
            *(1000 * seed + i, frozenset({EOS})),
        )
        for i, (kind, slot) in enumerate(zip(KINDS, order, strict=True))
    ]
    sampler = Sampler(plain, vocab)
    kernel = StepSampler(ours, Sampler(ours, vocab), vocab)
    for state in (ours, plain):
        state.apply_deltas(StepPlan(0, slot_inits=inits))
    for step in range(2):
        logits = (3 * torch.randn(num_rows + 1, padded, generator=generator)).to(dtype)
        logits[:, vocab:] = 1e4  # padding of the head, never to be sampled
        logits[3, : vocab // 2] = logits[3, :vocab].max()  # many equal best
        logits[2, : vocab // 2] = 1.0  # equal values around the k-th
        logits[10, ::3] = 2.0  # and around top_p
        logits[15, ::2] = 2.0
        logits[9] -= 40.0  # all negative, and many equal around the k-th
        logits[9, : vocab // 2] = -35.5
        logits = logits.to(device)
        start = len(PROMPT) + len(OUTPUT) + step - 1
        rows = [Row(None, 0, slot, start, 1, samples=True) for slot in order]  # type: ignore[arg-type]
        plan = StepPlan(step, rows=rows)
        slots = torch.tensor([*order, -1], device=device)
        positions = torch.full((num_rows + 1,), start + 1, device=device)
        out = torch.full((num_rows + 1,), -9, dtype=torch.int32, device=device)
        kernel.admit(plan)
        kernel.run_kernel(logits, slots, positions, out)
        assert out[-1] == -1
        groups = sampler._make_groups(order, slots[:-1])
        wanted = torch.empty(num_rows, dtype=torch.int64, device=device)
        for group in groups:
            for row in group.host_rows:
                one = sampler._make_groups([order[row]], slots[row : row + 1])[0]
                args = (one, logits[row : row + 1, :vocab], positions[:1])
                token = int(sampler._sample_group(*args))
                wanted[row] = token
                got = int(out[row])
                is_random = KINDS[row]["temperature"] > 1e-38
                close = is_random and token >= 0 and runner_up_gap(sampler, *args) < 1e-3
                if 0 < KINDS[row]["temperature"] < 1e-38:  # as good as greedy, any of equal best
                    close = bool(logits[row, got] == logits[row, :vocab].max())
                assert got == token or close, (row, KINDS[row], got, token)
                wanted[row] = got
        for row, slot in enumerate(order):
            assert int(ours.tokens[slot, start + 1]) == max(int(out[row]), 0)
            plain.slots[slot].length = ours.slots[slot].length = start + 2  # type: ignore[union-attr]
            if plain.slots[slot].features.has_penalties:  # type: ignore[union-attr]
                plain.by_token.count(slot, wanted[row : row + 1], 1)
                counts = [state.by_token.count_tables()[0][slot] for state in (ours, plain)]
                assert torch.equal(*counts)


def check_uniforms(device: str) -> None:
    """Bit-identical to `noise.py`, and the logarithms as good."""
    from nvcli.kernels import noise
    from tests.kernels.noise_kernel import noise_kernel

    size = 4096
    keys = noise.noise_keys(torch.arange(-8, 8) * 1_000_003, torch.arange(16)).to(device)
    uniforms = torch.empty(16, size, device=device)
    gumbels = torch.empty_like(uniforms)
    noise_kernel[(16,)](keys, uniforms, gumbels, SIZE=size)
    ids = torch.arange(size, device=device)
    assert torch.equal(uniforms, noise.uniforms(keys, ids))
    exact = -(-torch.log1p(-uniforms.double())).log()
    assert (gumbels.double() - exact).abs().max() < 1e-5


def check_prepare(device: str) -> None:
    from nvcli.kernels.prepare import BLOCK_SHIFT, IS_STORED, SAMPLES, StepTensors, prepare

    def brings(block: int) -> int:
        return block + 1 << BLOCK_SHIFT

    generator = torch.Generator().manual_seed(1)
    P, num_slots, length = 4, 6, 40
    tokens = torch.randint(0, 999, (num_slots, length), generator=generator, dtype=torch.int32)
    table = torch.randperm(60, generator=generator).view(num_slots, 10).to(torch.int32)
    dummy = [num_slots - 1, 0, 0, 0]
    mixed = [[2, 0, 7, SAMPLES], [0, 9, 1, SAMPLES], [4, 3, 5, 0], [1, 4, 4, SAMPLES | IS_STORED]]
    decode = [[2, 7, 1, SAMPLES], [0, 0, 1, 0], [3, 39, 1, IS_STORED]]
    for rows, num_tokens, is_decode in (
        ([*mixed, dummy, dummy], 32, False),
        (mixed, 17, False),
        ([[3, 0, 16, SAMPLES]], 16, False),
        (decode, 3, True),
        ([*decode, dummy], 4, True),
        ([[5, 12, 1, SAMPLES]], 1, True),
        ([[4, 8, 1, SAMPLES | brings(0)], [2, 7, 1, SAMPLES], [1, 0, 1, brings(63)]], 3, True),
    ):
        step = StepTensors.allocate(8, 40, torch.device(device))
        for name in step.__slots__:
            getattr(step, name).fill_(77)
        step = step.cut(len(rows), num_tokens)
        step.rows.copy_(torch.tensor(rows, dtype=torch.int32))
        assert step.sent[1:].tolist() == rows, "one buffer, sent as one"
        on_device = table.to(device, copy=True)
        prepare(step, tokens.to(device), on_device, P, is_decode=is_decode)
        for slot, start, _, flags in rows:
            if flags >> BLOCK_SHIFT:
                table[slot, start // P] = (flags >> BLOCK_SHIFT) - 1
        assert on_device.tolist() == table.tolist()
        inputs, positions, slots, bounds, last = [], [], [], [0], []
        for slot, start, n, flags in rows:
            for position in range(start, start + n):
                inputs.append(int(tokens[slot, position]))
                positions.append(position)
                at = int(table[slot, position // P]) * P + position % P
                slots.append(-1 if flags & IS_STORED else at)
            if is_decode and n == 0:
                inputs.append(0)
                positions.append(0)
                slots.append(-1)
            bounds.append(len(inputs))
            last.append(max(len(inputs) - 1, 0))
        rest = num_tokens - len(inputs)
        assert step.input_ids.tolist() == inputs + [0] * rest
        assert step.positions.tolist() == positions + [0] * rest
        assert step.slot_mapping.tolist() == slots + [-1] * rest
        assert step.cu_seqlens_q.tolist() == bounds
        assert step.logits_indices.tolist() == last
        assert step.seq_lens.tolist() == [start + n for _, start, n, _ in rows]
        assert step.slots.tolist() == [slot for slot, *_ in rows]
        assert step.sample_slots.tolist() == [s if f & SAMPLES else -1 for s, _, _, f in rows]
        assert step.sample_positions.tolist() == [start + n for _, start, n, _ in rows]


def check_hand_over(device: str) -> None:
    from nvcli.kernels.prepare import hand_over

    for num_rows, turn in ((1, 0), (5, 3), (256, 1), (300, 2)):
        out = torch.arange(num_rows, dtype=torch.int32, device=device) - 1
        head = torch.tensor([turn, 7, 7, 7], dtype=torch.int32, device=device)
        host = torch.full((4, 320), -9, dtype=torch.int32, pin_memory=device == "cuda")
        hand_over(out, head, host)
        if device == "cuda":
            torch.cuda.synchronize()
        want = torch.full((4, 320), -9, dtype=torch.int32)
        want[turn, :num_rows].copy_(out)
        assert host.tolist() == want.tolist()


def check_all_in_float32() -> None:
    from nvcli.kernels import sampling

    sampling.CHUNK, sampling.TILE = 256, 512
    sampling.PART = 8
    sampling.CHUNKS_A_PROGRAM = ((1, 1000),)  # one program a row
    check_sampling(1100, 1200, torch.float32, "cpu")
    sampling.CHUNKS_A_PROGRAM = ((1, 3),)
    for vocab, padded in ((290, 300), (64, 64), (1100, 1200)):
        check_sampling(vocab, padded, torch.float32, "cpu")
    check_sampling(1100, 1200, torch.float16, "cpu")
    check_sampling(1100, 1200, torch.bfloat16, "cpu")
    check_uniforms("cpu")
    check_prepare("cpu")
    check_hand_over("cpu")


@needs_triton
@pytest.mark.interpret
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_sampling_kernels", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("chunks", [4, 10, 1000])
def test_sampling_on_cuda(dtype: torch.dtype, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvcli.kernels import sampling

    monkeypatch.setattr(sampling, "CHUNKS_A_PROGRAM", ((1, chunks),))
    for vocab, padded, seeds in ((290, 300, 5), (4097, 4200, 5), (151_669, 151_936, 2)):
        for seed in range(seeds):
            check_sampling(vocab, padded, dtype, "cuda", seed)


@needs_triton
@pytest.mark.gpu
def test_noise_and_prepare_on_cuda() -> None:
    check_uniforms("cuda")
    check_prepare("cuda")
    check_hand_over("cuda")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (32, 1.0), (0, 0.6), (40, 0.6)])
def test_sampling_is_the_softmax(top_k: int, top_p: float) -> None:
    """200,000 draws over 320 tokens: chi-squared within five standard deviations."""
    from nvcli.engine.sampler import filter_sorted, scale
    from nvcli.kernels import sampling

    num_rows, vocab = 200_000, 320
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = row.cuda().expand(num_rows, -1).contiguous()
    params_f = torch.zeros(1, 8, dtype=torch.float64, device="cuda")
    params_f[0, :2] = torch.tensor([0.8, top_p])
    params_i = torch.zeros(1, 8, dtype=torch.int64, device="cuda")
    params_i[0, :2] = torch.tensor([top_k, 1234])
    positions = torch.arange(num_rows, device="cuda")
    tokens = torch.zeros(1, num_rows, dtype=torch.int32, device="cuda")
    out = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    counters = torch.zeros(50_000, dtype=torch.int32, device="cuda")
    for first in range(0, num_rows, 50_000):
        part = slice(first, first + 50_000)
        slots = torch.zeros(50_000, dtype=torch.int64, device="cuda")
        place = (slots, positions[part], params_f, params_i, tokens, out[part], counters)
        sampling.sample(logits[part], *place, vocab)
    assert not counters.any()
    counts = torch.bincount(out.long(), minlength=vocab).double().cpu()
    values, order = row.float()[None].sort(dim=1, descending=True, stable=True)
    left = filter_sorted(
        scale(values, torch.tensor([0.8])),
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.zeros(1),
    )
    wanted = torch.zeros(vocab, dtype=torch.float64)
    wanted[order[0]] = num_rows * left[0].double().softmax(0)
    is_left = wanted > 0
    assert counts[~is_left].sum() == 0
    chi2 = ((counts - wanted) ** 2 / wanted)[is_left].sum().item()
    degrees = int(is_left.sum()) - 1
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees)
