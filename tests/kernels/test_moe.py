"""Router and experts: hand-made cases, PyTorch's versions against each other, kernel source in the
interpreter, bfloat16 on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.test_row_kernels import randn
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter

# tokens, experts X, experts a token K, hidden E, inner F
SHAPES = [
    (1, 8, 2, 64, 48),
    (1, 6, 3, 100, 33),
    (5, 6, 2, 100, 33),
    (37, 5, 5, 24, 20),  # every token to every expert
    (20, 40, 8, 32, 16),  # more than one chunk of pairs
    (40, 1, 1, 16, 24),
    (150, 3, 2, 40, 72),
]
CUDA_SHAPES = [(t, 128, 8, 2048, 768) for t in (1, 2, 7, 33, 256, 1000, 3000)]
CUDA_SHAPES += [(1, 128, 8, 4096, 1536), (9, 128, 8, 2048, 96), (600, 60, 4, 1024, 1408)]
ROUTINGS = ("random", "one expert", "few", "padded")


# --- the router ----------------------------------------------------------------------------------


def route(logits: list[list[float]], top_k: int, **options: object) -> tuple[list[object], Tensor]:
    from nvcli import kernels

    is_token = options.pop("is_token", None)
    ids, weights = kernels.route(
        torch.tensor(logits),
        top_k,
        renormalise=bool(options.get("renormalise", False)),
        is_token=None if is_token is None else torch.tensor(is_token),
    )
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    return ids.tolist(), weights


@pytest.mark.torch
def test_route_by_hand() -> None:
    third = 1 / 3
    logits = [[0.0, 1.0986123, 1.0986123, -50.0]]  # softmax: 1, 3, 3, 0 of 7
    ids, weights = route(logits, 3)
    assert ids == [[1, 2, 0]]
    torch.testing.assert_close(weights, torch.tensor([[3 / 7, 3 / 7, 1 / 7]]))
    ids, weights = route([[5.0, 5.0, 5.0]], 3, renormalise=True)
    assert ids == [[0, 1, 2]]  # a tie goes to the lower id
    torch.testing.assert_close(weights, torch.tensor([[third] * 3]))
    _, weights = route(logits, 2, renormalise=True)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5]]))


@pytest.mark.torch
def test_padding_goes_to_no_expert() -> None:
    ids, weights = route([[0.0, 1.0], [0.0, 1.0]], 1, is_token=[True, False])
    assert ids == [[1], [2]]
    assert weights[1].item() == 0.0


# --- cases ---------------------------------------------------------------------------------------


def make_case(
    shape: tuple[int, ...], routing: str, dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    """x, ids, weights, gate_up, down."""
    num_tokens, num_experts, top_k, size, inner = shape
    generator = torch.Generator(device).manual_seed(0)  # a layer's weights take a CPU too long

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    x = normal(num_tokens, size)
    gate_up = normal(num_experts, 2 * inner, size) / size**0.5
    down = normal(num_experts, size, inner) / inner**0.5
    logits = normal(num_tokens, num_experts).float()
    if routing == "one expert":  # all tokens to the same ones, the rest is not hit
        logits = logits[:1].expand(num_tokens, -1).contiguous()
    elif routing == "few":
        logits[:, num_experts // 2 + 1 :] -= 100
    from nvcli.kernels import reference

    is_token = None
    if routing == "padded":
        is_token = torch.arange(num_tokens, device=device) < num_tokens // 2
    ids, weights = reference.route(logits, top_k, renormalise=True, is_token=is_token)
    return x, ids, weights, gate_up, down


@pytest.mark.torch
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_on_the_cpu_as_every_expert_for_every_token(
    shape: tuple[int, ...], routing: str
) -> None:
    from nvcli.kernels import cpu, reference

    case = make_case(shape, routing, torch.float32, "cpu")
    torch.testing.assert_close(cpu.experts(*case), reference.experts(*case), atol=2e-5, rtol=1e-5)


@pytest.mark.torch
def test_experts_by_hand() -> None:
    """One hidden and one inner unit: y = down * silu(gate x) * up x, weighted."""
    from nvcli import kernels

    gate_up = torch.tensor([[[1.0], [2.0]], [[1.0], [-1.0]]])  # [X, 2F, E]
    down = torch.tensor([[[3.0]], [[5.0]]])
    out = kernels.experts(
        torch.tensor([[1.0], [1.0]]),
        torch.tensor([[0, 1], [1, 2]], dtype=torch.int32),
        torch.tensor([[0.25, 0.75], [1.0, 9.0]]),
        gate_up,
        down,
    )
    silu = 1 / (1 + torch.exp(torch.tensor(-1.0)))
    expected = torch.stack([0.25 * 6 * silu - 0.75 * 5 * silu, -5 * silu])
    torch.testing.assert_close(out[:, 0], expected)


# --- kernels -------------------------------------------------------------------------------------


def check_route(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    from nvcli.kernels import moe_route, reference

    num_tokens, num_experts, top_k = shape[:3]
    logits = randn(num_tokens, num_experts, dtype=torch.float32, device=device)
    logits = (4 * logits).round().div(4).to(dtype)  # so that there are ties
    is_token = torch.arange(num_tokens, device=device) % 3 != 1
    for renormalise in (False, True):
        for real in (None, is_token):
            options = {"renormalise": renormalise, "is_token": real}
            ids, weights = moe_route.route(logits, top_k, **options)
            expected, exact = reference.route(logits, top_k, **options)
            assert torch.equal(ids, expected)
            torch.testing.assert_close(weights, exact, atol=1e-6, rtol=1e-5)


def check_hostile_logits(device: str) -> None:
    """Ids are addresses: whatever the logits, they are ids, and no two of a token are equal."""
    from nvcli.kernels import moe_route

    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 6, [nan, 1, nan, 2, 0, nan], [inf, -inf, inf, 0, 0, -inf], [-inf] * 6]
    logits = torch.tensor(rows, device=device)
    for top_k in (1, 4, 6):
        ids, weights = moe_route.route(logits, top_k, renormalise=True)
        for row in ids.tolist():
            assert len(set(row)) == top_k
            assert set(row) <= set(range(6))
        assert weights[0].isnan().all()


def check_groups(shape: tuple[int, ...], routing: str, device: str, rows: int) -> None:
    """Tiles hold every pair that has an expert once, in order, and are cut as few as can be."""
    from nvcli.kernels import moe_route

    num_experts = shape[1]
    ids = make_case(shape, routing, torch.float32, device)[1]
    order, tiles = (t.tolist() for t in moe_route.group(ids, num_experts, rows))
    pairs = ids.flatten().tolist()
    expected: list[tuple[int, list[int]]] = []
    for expert in range(num_experts):
        mine = [pair for pair, e in enumerate(pairs) if e == expert]
        expected += [(expert, mine[i : i + rows]) for i in range(0, len(mine), rows)]
    found = [(expert, order[a:b][:rows]) for expert, a, b, _ in tiles if expert < num_experts]
    assert found == expected
    assert all(expert >= num_experts for expert, *_ in tiles[len(expected) :])


def check_experts(shape: tuple[int, ...], routing: str, dtype: torch.dtype, device: str) -> None:
    from nvcli.kernels import moe, moe_row, reference

    case = make_case(shape, routing, dtype, device)
    x, ids, weights, gate_up, down = case
    plain = reference.experts(*case)
    exact = reference.experts(x.float(), ids, weights, gate_up.float(), down.float())
    for deterministic in (False, True):
        got = moe.experts(*case, deterministic=deterministic)
        assert_as_good_as_torch(got, plain, exact)
        if device == "cuda":
            assert torch.equal(got, moe.experts(*case, deterministic=deterministic)), "a race"
    addends = moe.experts(*case, as_addends=True)
    if shape[0] <= moe.ADDENDS_TOKENS:
        is_token = (ids < shape[1]).all(dim=1)
        assert addends.shape == (shape[2], *x.shape)
        assert addends.is_contiguous()
        if is_token.any():
            total = reference.added_up(addends, dtype)[is_token]
            assert_as_good_as_torch(total, plain[is_token], exact[is_token])
    else:
        assert torch.equal(addends, moe.experts(*case))
    assert moe.experts(*case, deterministic=True, as_addends=True).dim() == 2
    if shape[0] == 1:
        assert moe_row.fits(x, ids, gate_up, down)
        assert_as_good_as_torch(moe_row.experts(*case), plain, exact)


def check_rows_do_not_meet(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Deterministic: a token alone, in a part, and in another order has the same bits."""
    from nvcli.kernels import moe

    x, ids, weights, gate_up, down = make_case(shape, "random", dtype, device)

    def run(rows: Tensor | slice) -> Tensor:
        some = (x[rows].contiguous(), ids[rows].contiguous(), weights[rows].contiguous())
        return moe.experts(*some, gate_up, down, deterministic=True)

    num_tokens = shape[0]
    whole = run(slice(None))
    for first, last in ((0, 1), (num_tokens - 1, num_tokens), (num_tokens // 3, num_tokens)):
        assert torch.equal(run(slice(first, last)), whole[first:last])
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(run(order), whole[order])


@needs_triton
@pytest.mark.torch
def test_what_fits() -> None:
    from nvcli.kernels import moe, moe_row

    def fits(*shape: int) -> bool:
        x, ids, _, gate_up, down = make_case(shape, "random", torch.float32, "cpu")
        return moe_row.fits(x, ids, gate_up, down)

    assert fits(1, 3, 2, 8, 8)
    assert not fits(2, 3, 2, 8, 8)
    assert not fits(1, 2, 1, 16_385, 1)  # gate and up of one output
    assert not fits(1, 5, 5, 1, 5000)  # five experts' rows of one
    half, single = torch.empty(1, 8, dtype=torch.bfloat16), torch.empty(1, 8)
    for x, pairs, exact, rows in (
        (half, 8 * 128, False, 16),
        (half, 9 * 128, False, 32),
        (half, 17 * 128, False, 64),
        (half, 65 * 128, False, 128),
        (single, 65 * 128, False, 64),
        (half, 1, True, 64),
        (half, 65 * 128, True, 64),
    ):
        assert moe.tile_for(x, pairs, 128, deterministic=exact).rows == rows
    for pairs in range(1, 60):
        counts = [pairs - 5 * 3, 3, 3, 3, 3, 3] if pairs > 15 else [1] * pairs
        tiles = sum(-(-count // 16) for count in counts)
        assert tiles <= moe_max_tiles(pairs)


def moe_max_tiles(pairs: int) -> int:
    from nvcli.kernels import moe_route

    return moe_route.max_tiles(pairs, 6 if pairs > 15 else 128, 16)


def check_routes_in_float32() -> None:
    for shape in SHAPES:
        check_route(shape, torch.float32, "cpu")
    check_hostile_logits("cpu")
    for i, shape in enumerate(SHAPES):
        check_groups(shape, ROUTINGS[i % 4], "cpu", 16)
    check_groups((600, 7, 7, 8, 8), "random", "cpu", 64)  # the larger chunks


def check_experts_in_float32() -> None:
    from nvcli.kernels import moe

    for i, shape in enumerate(SHAPES):
        check_experts(shape, ROUTINGS[i % 4], torch.float32, "cpu")
    check_experts(SHAPES[2], "padded", torch.float32, "cpu")
    for shape in (SHAPES[2], SHAPES[4]):
        check_rows_do_not_meet(shape, torch.float32, "cpu")
    moe.tile_for = lambda *args, **options: moe.LARGE_TILE
    check_experts((150, 2, 1, 70, 130), "random", torch.float32, "cpu")


@needs_triton
@pytest.mark.interpret
@pytest.mark.parametrize("name", ["check_routes_in_float32", "check_experts_in_float32"])
def test_kernel_sources_in_the_interpreter(name: str) -> None:
    run_in_interpreter("tests.kernels.test_moe", name)


# The last two: shares of four and eight ranks, whose inner size is no whole number of tiles.
HOPPER_SHAPES = [(1, 128, 8, 2048, 768), (4000, 128, 8, 2048, 768)]
HOPPER_SHAPES += [(9, 128, 8, 2048, 192), (200, 128, 8, 2048, 96)]


def compile_for_hopper() -> None:
    from benchmarks.kernels.compile_ahead import compile_only, resources
    from nvcli.kernels import moe, moe_route, moe_row

    compiler = compile_only()
    for num_tokens, num_experts, top_k, size, inner in HOPPER_SHAPES:
        x, logits = (torch.empty(num_tokens, n).bfloat16() for n in (size, num_experts))
        gate_up = torch.empty(num_experts, 2 * inner, size, dtype=torch.bfloat16)
        down = torch.empty(num_experts, size, inner, dtype=torch.bfloat16)
        is_token = torch.ones(num_tokens, dtype=torch.bool)
        routed = moe_route.route(logits, top_k, renormalise=True, is_token=is_token)
        if num_tokens == 1:
            moe_row.experts(x, *routed, gate_up, down)
        moe.experts(x, *routed, gate_up, down, deterministic=num_tokens == 9)
        moe.experts(x, *routed, gate_up, down)
    found = [resources(kernel) for kernel in compiler.kernels.values()]
    assert len({text.split()[0] for text in found}) == 7, found  # every kernel there is
    assert all(" STACK:0 LOCAL:0" in text for text in found), found


@needs_triton
@pytest.mark.interpret
def test_variants_compile_for_hopper_without_spills(tmp_path: Path) -> None:
    code = "from tests.kernels.test_moe import compile_for_hopper; compile_for_hopper()"
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stdout + run.stderr


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, *CUDA_SHAPES], ids=str)
def test_on_cuda(shape: tuple[int, ...]) -> None:
    check_route(shape, torch.bfloat16, "cuda")
    for routing in ROUTINGS:
        for rows in (16, 128):
            check_groups((*shape[:3], 8, 8), routing, "cuda", rows)
        check_experts(shape, routing, torch.bfloat16, "cuda")


@needs_triton
@pytest.mark.gpu
def test_hostile_logits_on_cuda() -> None:
    check_hostile_logits("cuda")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2, 65, 700])
def test_rows_do_not_meet_on_cuda(num_tokens: int) -> None:
    check_rows_do_not_meet((num_tokens, 128, 8, 2048, 768), torch.bfloat16, "cuda")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_dependent_launch_changes_nothing(num_tokens: int) -> None:
    from nvcli import kernels
    from nvcli.kernels import launch

    x, _, _, gate_up, down = make_case(
        (num_tokens, 16, 4, 512, 256), "random", torch.bfloat16, "cuda"
    )
    router = randn(16, 512, dtype=torch.bfloat16, device="cuda", seed=5)
    results = []
    for enabled in (False, True):
        launch.set_pdl(enabled)
        out = x
        for _ in range(20):  # a chain, each reading what the one before wrote
            routed = kernels.route(kernels.linear(out, router, None), 4, renormalise=True)
            out = kernels.rms_norm(kernels.experts(out, *routed, gate_up, down), x[0], 1e-6)
        results.append(out.clone())
    launch.set_pdl(True)
    assert torch.equal(*results)
