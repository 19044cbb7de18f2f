"""The KV cache: bytes, blocks that fit, and views."""

from __future__ import annotations

import dataclasses
import re
import resource
from pathlib import Path

import pytest
import torch

from nvcli.cli import engine_options
from nvcli.engine import kv_cache
from nvcli.engine.kv_cache import (
    KVCache,
    KVCacheSpec,
    available_memory,
    format_bytes,
    reserving,
    size_pool,
)
from nvcli.errors import ContextLengthError, OutOfMemoryError

pytestmark = pytest.mark.torch

QWEN3_0_6B = KVCacheSpec(
    num_layers=28, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16
)
SMALL = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)


def test_bytes_of_qwen3_0_6b() -> None:
    assert QWEN3_0_6B.bytes_per_token == 114_688  # engine.md, section 2
    assert QWEN3_0_6B.bytes_per_block == 16 * 114_688


def pool(
    budget_blocks: int, *, seqs: int = 4, length: int = 40, requested: bool = False
) -> tuple[int, int]:
    return size_pool(
        SMALL,
        budget_bytes=budget_blocks * SMALL.bytes_per_block,
        max_num_seqs=seqs,
        max_model_len=length,
        is_len_requested=requested,
    )


def test_pool_fills_the_budget_but_for_the_dummy() -> None:
    assert pool(21) == (20, 40)


def test_pool_is_never_larger_than_sequences_can_use() -> None:
    assert pool(1000) == (4 * 10, 40)


def test_model_limit_shrinks_to_what_fits() -> None:
    assert pool(6) == (5, 20)


def test_a_requested_length_beyond_memory_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfMemoryError, match=r"--max-model-len 40 needs") as caught:
        pool(6, requested=True)
    assert caught.value.exit_code == 3
    assert "--max-model-len 20" in str(caught.value)


@pytest.mark.parametrize("blocks", [1, 0, -5])
def test_no_room_for_one_block_is_refused(blocks: int) -> None:
    with pytest.raises(OutOfMemoryError, match="left for the KV cache") as caught:
        pool(blocks)
    assert caught.value.hint is not None


def test_blocks_that_are_too_large_are_what_is_to_be_changed() -> None:
    """Not the memory, nor the model."""
    size = 1_000_000
    spec = dataclasses.replace(SMALL, block_size=size)
    room = 40 * SMALL.bytes_per_token
    with pytest.raises(OutOfMemoryError, match=f"two blocks of {size} tokens need") as caught:
        size_pool(spec, budget_bytes=room, max_num_seqs=4, max_model_len=40, is_len_requested=False)
    assert caught.value.hint == "Use a --block-size of at most 20; 16 is the default."
    assert caught.value.param == "block_size"


def test_views_have_a_dummy_block_of_their_own() -> None:
    cache = KVCache(SMALL, 6, torch.device("cpu"))
    assert len(cache.layers) == 2
    for k, v in cache.layers:
        assert k.shape == v.shape == (7, 4, 2, 8)
        assert k.is_contiguous()
        assert not k.any()
    assert cache.dummy_block == 6
    assert cache.nbytes == cache.pool.numel() * 4
    cache.layers[1][0][6] = torch.nan
    assert not cache.pool[:, :, :6].isnan().any()
    assert not cache.layers[0][0].isnan().any()


def test_too_large_a_pool_is_one_clear_error() -> None:
    with pytest.raises(OutOfMemoryError, match="the device refused it"):
        KVCache(SMALL, 1 << 50, torch.device("cpu"))


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, OverflowError, ValueError])
def test_a_refused_allocation_is_one_clear_error(error: type[Exception]) -> None:
    cpu = torch.device("cpu")
    with (
        pytest.raises(OutOfMemoryError, match="the tables need 5 B, and the device refused it"),
        reserving(5, "the tables", cpu, hint="Lower --max-num-seqs."),
    ):
        raise error("DefaultCPUAllocator: not enough memory\nand a second line")


def test_what_memory_cannot_hold_is_not_tried() -> None:
    with (
        pytest.raises(OutOfMemoryError, match=r"need 1000000\.0 GB, and .* are available"),
        reserving(10**15, "the tables", torch.device("cpu"), hint="Lower --max-num-seqs."),
    ):
        raise AssertionError("it was tried")


def test_hints_name_flags_that_exist() -> None:
    flags = set(re.findall(r'[" ](--[a-z-]+)[" ,]', Path(engine_options.__file__).read_text()))
    flag = re.compile(r"(?<=[ \"])--[a-z][a-z-]+(?=[\s\".,])")
    sources = Path(kv_cache.__file__).parent.glob("*.py")
    named = {name for path in sources for name in flag.findall(path.read_text())}
    assert {"--max-num-seqs", "--max-model-len", "--dtype"} <= named
    assert named <= flags | {"--debug"}, "which all commands have"
    too_long = ContextLengthError.of_prompt(9, 8)
    assert too_long is not None
    assert set(re.findall(r"--[a-z-]+[a-z]", too_long.hint or "")) == {"--max-model-len"} & flags


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_an_unused_pool_takes_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    cache = KVCache(SMALL, 600_000, torch.device("cpu"))
    assert cache.nbytes > 1 << 29
    assert resident() - before < 1 << 26
    assert cache.pool.data_ptr() % 64 == 0


def test_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    2000 kB\n")
    assert available_memory(meminfo) == 2_048_000
    assert available_memory(tmp_path / "missing") > 1 << 20
    assert available_memory() > 1 << 20


def test_format_bytes() -> None:
    sizes = (0, 999, 1000, 1_500_000, 2_400_000_000_000)
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "2400.0 GB",
    ]
