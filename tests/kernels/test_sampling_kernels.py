"""The sampling and prepare kernels against the sampler's own functions and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_testing import needs_triton, run_in_interpreter

# temperature, top_k, top_p, min_p
PARAMS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1e-3, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.0),
    (1.3, 1, 1.0, 0.0),
    (2.0, 32, 0.3, 0.1),
    (0.7, 3, 1.0, 0.6),
    (1e-40, 0, 1.0, 0.0),
    (1.0, 32, 0.8, 0.0),
]


def expected(
    row: Tensor, seed: int, position: int, params: tuple[float, int, float, float]
) -> tuple[int, float]:
    """The token by the sampler's functions, and how far the runner-up is behind.

    row: [v] of the logits' own type.
    """
    from nvcli.engine.sampler import filter_sorted, scale, top_candidates
    from nvcli.kernels.noise import gumbel_noise, noise_keys

    temperature, top_k, top_p, min_p = params
    if temperature == 0:
        return int(row.argmax()), math.inf
    key = noise_keys(torch.tensor([seed]), torch.tensor([position])).to(row.device)
    ids = torch.arange(len(row), device=row.device)
    temperatures = torch.tensor([temperature], device=row.device)
    if top_k:
        values, best = top_candidates(row[None], min(32, len(row)))
        y = filter_sorted(
            scale(values, temperatures),
            torch.tensor([top_k], device=row.device),
            torch.tensor([top_p], dtype=torch.float64, device=row.device),
            torch.tensor([min_p], device=row.device),
        )
        ids = best[0]
    else:
        y = scale(row[None].float(), temperatures)
    scores = (y + gumbel_noise(key, ids))[0]
    top = scores.topk(min(2, len(scores)))
    gap = (top.values[0] - top.values[-1]).item() if len(scores) > 1 else math.inf
    return int(ids[top.indices[0]]), gap


def check_sampling(vocab: int, padded: int, dtype: torch.dtype, device: str, seed: int = 0) -> None:
    from nvcli.kernels import sampling

    generator = torch.Generator().manual_seed(seed)
    num_rows, num_slots = len(PARAMS) + 1, len(PARAMS) + 3
    logits = (3 * torch.randn(num_rows, padded, generator=generator)).to(dtype)
    logits[:, vocab:] = 1e4  # padding of the head, never to be sampled
    logits[3, : vocab // 2] = logits[3, :vocab].max()  # many equal best
    logits[2, : vocab // 2] = 1.0  # equal values around the k-th
    logits = logits.to(device)
    order = torch.randperm(num_slots, generator=generator)[:num_rows].tolist()
    params_f = torch.zeros(num_slots, 8, dtype=torch.float64)
    params_i = torch.zeros(num_slots, 8, dtype=torch.int64)
    seeds = torch.randint(-(1 << 62), 1 << 62, (num_rows,), generator=generator).tolist()
    positions = torch.randint(0, 40, (num_rows,), generator=generator)
    for (temperature, top_k, top_p, min_p), slot, row_seed in zip(
        PARAMS, order, seeds, strict=False
    ):
        params_f[slot, :3] = torch.tensor([temperature, top_p, min_p], dtype=torch.float64)
        params_i[slot, :2] = torch.tensor([top_k, row_seed])
    slots = torch.tensor([*order[:-1], -1])
    tokens = torch.full((num_slots, 41), -7, dtype=torch.int32, device=device)
    out = torch.full((num_rows,), -9, dtype=torch.int32, device=device)
    sampling.sample(
        logits,
        slots.to(device),
        positions.to(device),
        params_f.to(device),
        params_i.to(device),
        tokens,
        out,
        vocab,
    )
    assert out[-1] == -1
    for i, params in enumerate(PARAMS):
        token, gap = expected(logits[i, :vocab], seeds[i], int(positions[i]), params)
        if params[0] < 1e-38:  # no float32 temperature: as good as greedy
            token, gap = int(logits[i, :vocab].argmax()), math.inf
        assert int(out[i]) == token or gap < 1e-4, (params, int(out[i]), token, gap)
        assert int(tokens[order[i], positions[i]]) == int(out[i])
    assert int((tokens != -7).sum()) == len(PARAMS)


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
    from nvcli.kernels.prepare import IS_STORED, SAMPLES, StepTensors, prepare

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
    ):
        step = StepTensors.allocate(8, 40, torch.device(device))
        for name in step.__slots__:
            getattr(step, name).fill_(77)
        step = step.cut(len(rows), num_tokens)
        step.rows.copy_(torch.tensor(rows, dtype=torch.int32))
        prepare(step, tokens.to(device), table.to(device), P, is_decode=is_decode)
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


def check_all_in_float32() -> None:
    from nvcli.kernels import sampling

    sampling.CHUNK = 256  # the interpreter is slow at ordering wide chunks
    for vocab, padded in ((290, 300), (64, 64), (4097, 4200)):
        check_sampling(vocab, padded, torch.float32, "cpu")
    check_uniforms("cpu")
    check_prepare("cpu")


@needs_triton
@pytest.mark.interpret
@pytest.mark.timeout(300)
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_sampling_kernels", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sampling_on_cuda(dtype: torch.dtype) -> None:
    for vocab, padded in ((290, 300), (4097, 4200), (151_669, 151_936)):
        for seed in range(5):
            check_sampling(vocab, padded, dtype, "cuda", seed)


@needs_triton
@pytest.mark.gpu
def test_noise_and_prepare_on_cuda() -> None:
    check_uniforms("cuda")
    check_prepare("cuda")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [0, 32])
def test_sampling_is_the_softmax(top_k: int) -> None:
    """200,000 draws over 32 tokens: chi-squared within five standard deviations."""
    from nvcli.kernels import sampling

    num_rows, vocab = 200_000, 32
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    logits = row.bfloat16().cuda().expand(num_rows, -1).contiguous()
    params_f = torch.zeros(1, 8, dtype=torch.float64, device="cuda")
    params_f[0, :2] = torch.tensor([0.8, 1.0])
    params_i = torch.zeros(1, 8, dtype=torch.int64, device="cuda")
    params_i[0, :2] = torch.tensor([top_k, 1234])
    positions = torch.arange(num_rows, device="cuda")
    tokens = torch.zeros(1, num_rows, dtype=torch.int32, device="cuda")
    out = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    for first in range(0, num_rows, 50_000):
        part = slice(first, first + 50_000)
        slots = torch.zeros(50_000, dtype=torch.int64, device="cuda")
        sampling.sample(
            logits[part], slots, positions[part], params_f, params_i, tokens, out[part], vocab
        )
    counts = torch.bincount(out.long(), minlength=vocab).double().cpu()
    wanted = num_rows * (row.bfloat16().double() / 0.8).softmax(0)
    chi2 = ((counts - wanted) ** 2 / wanted).sum().item()
    assert chi2 < vocab - 1 + 5 * math.sqrt(2 * (vocab - 1))
