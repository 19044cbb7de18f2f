"""What a start has loaded, and how long it took: the report that `-v`, `doctor` and benchmark rows
print.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvcli.engine.buckets import Buckets


@dataclass(frozen=True, slots=True)
class StartupReport:
    """What was loaded, and how long each stage took."""

    device: str
    dtype: str
    weights_dtype: str  # as `dtype`, "float8_e4m3fn", or "... from float8_e4m3fn"
    kv_cache_dtype: str
    attention_backend: str
    attention_reason: str
    max_model_len: int
    num_blocks: int
    block_size: int
    pool_bytes: int
    weights_bytes: int  # of this rank, as `pool_bytes`
    tensor_parallel_size: int = 1
    all_reduce: str = ""  # what sums over the ranks, in words
    deterministic: bool = False
    num_kernels: int = 0  # compiled before the first step, or found compiled
    num_graphs: int = 0
    buckets: Buckets | None = None  # of the graphs; None where every step runs eagerly
    graph_bytes: int = 0
    stage_s: dict[str, float] = field(default_factory=dict)


@contextmanager
def stage(stage_s: dict[str, float], name: str) -> Iterator[None]:
    """Notes in `stage_s` how many seconds the block took, unless it raises."""
    start = time.perf_counter()
    yield
    stage_s[name] = time.perf_counter() - start
