"""Triton helper: ask the memory for what is needed soon. Only under dependent launch (Hopper on)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_rows(pointers, mask, num_bytes):  # type: ignore[no-untyped-def]
    """Bring `num_bytes` (a multiple of 16) at each pointer into the L2 cache; nothing waits.

    pointers: [R], 16-byte aligned; mask: [R], where false nothing is asked for
    """
    tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            setp.ne.s32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.u32 $0, 0;
        }""",
        "=r,l,r,r",
        [pointers.to(tl.int64), mask.to(tl.int32), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
