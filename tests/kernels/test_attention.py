"""Attention backends against the reference, and the choice between them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvcli.errors import DeviceError
from nvcli.kernels import attention, flash_attention, reference
from nvcli.kernels.attention import select_backend
from nvcli.kernels.torch_attention import TorchAttention
from nvcli.kernels.triton_attention import TritonAttention
from tests.kernels.paged_cases import make_case, reference_of

CPU = torch.device("cpu")


CASES: dict[str, list[tuple[int, int]]] = {
    "one decoding": [(1, 9)],
    "one prompt": [(7, 7)],
    "one chunk": [(5, 12)],
    "first token": [(1, 1)],
    "equal decoding rows": [(1, 12)] * 4,
    "ragged decoding rows": [(1, n) for n in (1, 4, 5, 300, 280, 17, 16, 15)],
    "long and short": [(1, 400), (1, 2), (1, 390), (1, 3)],
    "mixed": [(1, 9), (6, 6), (1, 10), (3, 21), (1, 9), (2, 2)],
    "prompts only": [(3, 3), (5, 5)],
}


@pytest.mark.torch
@pytest.mark.parametrize("rows", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("layout", ["scattered", "consecutive", "heads first"])
def test_torch_backend_equals_reference(
    rows: list[tuple[int, int]], kv_heads: int, layout: str
) -> None:
    q, k, v, batch = make_case(
        rows,
        kv_heads=kv_heads,
        is_consecutive=layout == "consecutive",
        heads_first=layout == "heads first",
    )
    out = TorchAttention().forward(q, k, v, batch, 0.3)
    torch.testing.assert_close(out, reference_of(q, k, v, batch, 0.3), atol=2e-6, rtol=1e-5)


@pytest.mark.torch
def test_reference_by_hand() -> None:
    """One head of one dimension: a token attends to keys 0, ln 3 with weights 1/4 and 3/4."""
    k = torch.tensor([0.0, 3.0]).log1p().mul(2).div(2).view(1, 2, 1, 1)
    k[0, 1] = torch.tensor(3.0).log()
    v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
    q = torch.ones(2, 1, 1)
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    lens, tables = torch.tensor([2], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
    out = reference.paged_attention(q, k, v, bounds, lens, tables, 1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 7.0]))


@pytest.mark.torch
def test_one_backend_serves_steps_of_any_shape() -> None:
    """The gather buffers are kept between steps; nothing of an older step shows."""
    backend = TorchAttention()
    for seed, rows in enumerate([*CASES.values(), *CASES.values()]):
        q, k, v, batch = make_case(rows, seed=seed, kv_heads=1 + seed % 2)
        out = backend.forward(q, k, v, batch, 0.3)
        want = reference_of(q, k, v, batch, 0.3)
        torch.testing.assert_close(out, want, atol=2e-6, rtol=1e-5)


@pytest.mark.torch
def test_padding_rows_are_finite() -> None:
    q, k, v, batch = make_case([(1, 5), (1, 5)])
    batch.key_lens[1], batch.block_ids[1] = 0, []
    q[1] = float("nan")
    out = TorchAttention().forward(q, k, v, batch, 0.3)
    assert out[0].isfinite().all()
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_backend_in_16_bits(dtype: torch.dtype) -> None:
    """Off by no more than twice what rounding the exact result costs."""
    q, k, v, batch = make_case(CASES["mixed"], dtype=dtype)
    want = reference_of(q.float(), k.float(), v.float(), batch, 0.3)
    error = (TorchAttention().forward(q, k, v, batch, 0.3).float() - want).abs().max()
    rounding = (want.to(dtype).float() - want).abs().max()
    assert error <= 2 * rounding + 1e-3


# --- the choice ----------------------------------------------------------------------------------


def select(name: str, *, device: torch.device = CPU) -> tuple[str, str]:
    backend, reason = select_backend(
        name, device=device, dtype=torch.bfloat16, head_dim=128, block_size=16
    )
    return backend.name, reason


def test_auto_on_the_cpu() -> None:
    assert select("auto") == ("torch", "torch, for the CPU")


def test_torch_by_name() -> None:
    assert select("torch") == ("torch", "torch, as asked")


@pytest.mark.parametrize("name", ["fa2", "fa3", "triton"])
def test_flash_attention_needs_cuda(name: str) -> None:
    with pytest.raises(DeviceError) as caught:
        select(name)
    assert str(caught.value) == f"attention backend {name} cannot run: it needs a CUDA device"


def pretend_device(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_auto_on_hopper_without_triton_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_device(monkeypatch, capability=(9, 0))
    monkeypatch.setattr("nvcli.kernels.HAS_TRITON", False)
    assert select("auto", device=torch.device("cuda")) == (
        "torch",
        "torch, slow on CUDA; no fa3: it is not installed (pip install 'nvcli[fa3]'); "
        "no fa2: --block-size must be a multiple of 256, not 16",
    )


def test_auto_takes_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch, capability=(9, 0))
    monkeypatch.setattr("nvcli.kernels.HAS_TRITON", True)
    only_triton = {"triton": object()}
    monkeypatch.setattr("importlib.util.find_spec", only_triton.get)
    name, reason = select("auto", device=torch.device("cuda"))
    assert (name, reason) == ("triton", "triton, the fastest that fits")


def test_auto_leaves_long_prompts_to_fa3_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_device(monkeypatch, capability=(9, 0))
    monkeypatch.setattr("nvcli.kernels.HAS_TRITON", True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lambda name: object())
    name, reason = select("auto", device=torch.device("cuda"))
    assert (name, reason) == ("triton", "triton, with fa3 for long prompts")

    def broken(name: str) -> object:
        raise OSError("undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    name, reason = select("auto", device=torch.device("cuda"))
    assert (name, reason) == ("triton", "triton; no fa3 for long prompts: undefined symbol")


@pytest.mark.torch
def test_eager_prompts_are_the_librarys_and_decode_steps_ours() -> None:
    class Library:
        def forward(self, q: torch.Tensor, *rest: object) -> torch.Tensor:
            return torch.full_like(q, 7.0)

    q, k, v, batch = make_case([(3, 3), (1, 9)])
    backend = TritonAttention(prefill=Library())
    assert torch.equal(backend.forward(q, k, v, batch, 1.0), torch.full_like(q, 7.0))
    decode = make_case([(1, 3), (1, 9)])[3]
    assert backend._is_decode(2, decode)
    batch.is_padded = True
    assert not backend._is_decode(4, batch)


def test_absent_package_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch, capability=(9, 0))
    with pytest.raises(DeviceError) as caught:
        select("fa3", device=torch.device("cuda"))
    assert str(caught.value) == (
        "attention backend fa3 cannot run: it is not installed (pip install 'nvcli[fa3]')"
    )


def test_wrong_card_dtype_and_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch, capability=(8, 0))
    cuda = torch.device("cuda")
    fa3, fa2 = attention.FlashAttention3, attention.FlashAttention2
    assert fa3.obstacle(cuda, torch.bfloat16, 128, 16) == (
        "it has no kernels for compute capability 8.0"
    )
    assert fa2.obstacle(cuda, torch.float32, 128, 256) == (
        "it needs float16 or bfloat16, not float32"
    )
    assert fa2.obstacle(cuda, torch.float16, 512, 256) == "it has no head dimension 512"


# --- keys gathered for FlashAttention 3 ----------------------------------------------------------


class FakeFlash:
    """What FlashAttention 3 computes; remembers which of its functions was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flash_attn_with_kvcache(
        self, q: Tensor, k: Tensor, v: Tensor, **given: Any
    ) -> tuple[Tensor, None]:
        self.calls.append("pages")
        assert given["causal"]
        bounds, lens = given["cu_seqlens_q"], given["cache_seqlens"]
        scale = given["softmax_scale"]
        return reference.paged_attention(q, k, v, bounds, lens, given["page_table"], scale), None

    def flash_attn_varlen_func(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        self.calls.append("flat")
        assert given["causal"]
        assert given["max_seqlen_q"] == len(q)
        first, num_keys = given["cu_seqlens_k"].tolist()
        assert (first, given["max_seqlen_k"]) == (0, num_keys)
        one_page = torch.zeros((1, 1), dtype=torch.int32)
        lens = torch.tensor([num_keys], dtype=torch.int32)
        k, v = k[None, :num_keys], v[None, :num_keys]
        bounds, scale = given["cu_seqlens_q"], given["softmax_scale"]
        return reference.paged_attention(q, k, v, bounds, lens, one_page, scale)

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> list[Tensor | None]:
        """The operator that both functions call, with what they give it."""
        assert given.keys() <= flash_attention.OPERATOR_ARGUMENTS
        causal, num_splits = given.pop("is_causal"), given.pop("num_splits")
        if "page_table" in given:
            assert num_splits == 0
            lens = given.pop("seqused_k")
            out, lse = self.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=lens, causal=causal, **given
            )
            return [out, lse, None, None]
        assert num_splits == 1
        return [self.flash_attn_varlen_func(q, k, v, causal=causal, **given), None, None, None]


def fake_fa3(*, has_operator: bool = True) -> tuple[attention.FlashAttention3, FakeFlash]:
    backend, library = object.__new__(attention.FlashAttention3), FakeFlash()
    backend._library = library
    backend._operator = library.fwd if has_operator else None
    return backend, library


@pytest.mark.torch
@pytest.mark.parametrize("has_operator", [True, False])
def test_a_long_chunk_alone_gathers_its_keys(
    monkeypatch: pytest.MonkeyPatch, has_operator: bool
) -> None:
    monkeypatch.setattr(flash_attention, "FLAT_TOKENS", 5)
    for rows, way in (
        ([(5, 5)], "flat"),
        ([(6, 23)], "flat"),
        ([(4, 23)], "pages"),
        ([(6, 23), (5, 5)], "pages"),
    ):
        q, k, v, batch = make_case(rows, heads_first=True)
        backend, library = fake_fa3(has_operator=has_operator)
        for _ in range(2):  # layers
            out = backend.forward(q, k, v, batch, 0.3)
        assert library.calls == [way] * 2, rows
        torch.testing.assert_close(out, reference_of(q, k, v, batch, 0.3), atol=2e-6, rtol=1e-5)


@pytest.mark.torch
def test_keys_that_are_many_or_are_not_to_be_gathered_stay_in_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attention, "FLAT_TOKENS", 5)
    monkeypatch.setattr(flash_attention, "FLAT_BYTES", 4 * 2 * 8 * 23)
    for keys, way in ((23, "flat"), (24, "pages")):
        q, k, v, batch = make_case([(6, keys)])
        backend, library = fake_fa3()
        backend.forward(q, k, v, batch, 0.3)
        assert library.calls == [way]
    monkeypatch.setattr(flash_attention, "_use_flat_keys", False)
    q, k, v, batch = make_case([(6, 23)])
    backend, library = fake_fa3()
    backend.forward(q, k, v, batch, 0.3)
    assert library.calls == ["pages"]


# What FlashAttention 3 is to a process, on the CPU: an operator, and a function that comes to it by
# way of a `custom_op`. `ARGUMENTS` is replaced.
STAND_IN = """
import torch

_library = torch.library.Library("flash_attn_3", "DEF")
_library.define("fwd(ARGUMENTS) -> (Tensor, Tensor)")

def fwd(q, k, v, *rest, **given):
    return torch.full_like(q, 1), q

_library.impl("fwd", fwd, "CPU")

@torch.library.custom_op("flash_attn_3::wrapped", mutates_args=(), device_types="cpu")
def wrapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.full_like(q, 2)

def flash_attn_with_kvcache(q, k, v, **given):
    return wrapped(q, k, v)
"""
FWD = (
    "Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_k=None, int? max_seqlen_q=None, "
    "int? max_seqlen_k=None, Tensor? page_table=None, float? softmax_scale=None, "
    "bool is_causal=False, float softcap=0.0, int num_splits=0"
)
FIRST_CALL = """
import sys
import torch
from nvcli.kernels.flash_attention import FlashAttention3
from tests.kernels.paged_cases import make_case

q, k, v, batch = make_case([(5, 5), (2, 9)])
backend, before = FlashAttention3(), set(sys.modules)
out = backend.forward(q, k, v, batch, 0.3)
print(int(out.unique()), sorted(set(sys.modules) - before))
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("arguments", "switch", "value"),
    [
        (FWD, "1", 1),
        (FWD.replace("float? softmax_scale=None", "*, float softmax_scale"), "1", 1),
        (FWD.replace("seqused_k", "lens"), "1", 2),
        (FWD.replace("? k_new=None", "? k_new"), "1", 2),
        (FWD.replace("=None", ""), "1", 2),
        (FWD, "0", 2),
    ],
    ids=[
        "operator",
        "an operator that wants what is given",
        "an operator of other arguments",
        "an operator that wants another argument",
        "an operator of the first builds",
        "turned off",
    ],
)
def test_the_first_call_of_the_operator_imports_nothing(
    tmp_path: Path, arguments: str, switch: str, value: int
) -> None:
    """The functions beside it import all of `torch._dynamo`, which takes seconds."""
    (tmp_path / "flash_attn_interface.py").write_text(STAND_IN.replace("ARGUMENTS", arguments))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "NVCLI_FA3_OPERATOR": switch, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, env=env
    )
    assert run.returncode == 0, run.stderr
    found, imported = run.stdout.split(maxsplit=1)
    assert int(found) == value
    if value == 1:
        assert imported == "[]\n"


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("name", ["torch", "fa2", "fa3"])
def test_backends_on_cuda(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: list[tuple[int, int]]
) -> None:
    device = torch.device("cuda")
    block_size = 256 if name == "fa2" else 16
    try:
        backend, _ = select_backend(
            name, device=device, dtype=torch.bfloat16, head_dim=128, block_size=block_size
        )
    except DeviceError as error:
        pytest.skip(str(error))
    q, k, v, batch = make_case(
        rows, heads=8, head_dim=128, block_size=block_size, dtype=torch.bfloat16, heads_first=True
    )
    want = reference_of(q.float(), k.float(), v.float(), batch, 128**-0.5)
    for name_ in ("cu_seqlens_q", "seq_lens", "slots", "block_table"):
        setattr(batch, name_, getattr(batch, name_).to(device))
    k, v = (x.to(device).nan_to_num(0.0) for x in (k, v))
    out = backend.forward(q.to(device), k, v, batch, 128**-0.5)
    rounding = (want.bfloat16().float() - want).abs().max()
    assert (out.cpu().float() - want).abs().max() <= 2 * rounding + 2e-3
    if name != "fa3":
        return
    assert isinstance(backend, attention.FlashAttention3)
    operator = backend._operator
    assert operator is not None, "this FlashAttention 3 lacks an argument that we give"
    for tokens in (flash_attention.FLAT_TOKENS, 1):  # over pages; a row alone over gathered keys
        monkeypatch.setattr(flash_attention, "FLAT_TOKENS", tokens)
        found = []
        for backend._operator in (operator, None):
            batch.plan = None
            found.append(backend.forward(q.to(device), k, v, batch, 128**-0.5))
        assert torch.equal(*found), "the operator and the library's function differ"
        assert (found[0].cpu().float() - want).abs().max() <= 2 * rounding + 2e-3


@pytest.mark.torch
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.child])]
)
def test_a_start_imports_no_compiler_of_models(device: str) -> None:
    """`torch._dynamo` takes as long to import as torch itself, and nothing here needs it."""
    code = (
        "import sys; from nvcli import LLM, SamplingParams\n"
        f"with LLM('demo', device={device!r}) as llm:\n"
        "    llm.generate([list(range(1, 60))], SamplingParams(max_tokens=2))\n"
        "    print(llm.startup.attention_reason, 'torch._dynamo' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == "False", run.stdout
