"""A kernel that is wrong, run beside the tests of `benchmarks.kernels.sanitize`: were it not
reported, that of the others nothing is reported would mean nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SIZE = 100  # floats: the 28 beyond are in the allocator's block, and in the device's page


@triton.jit
def _read_beyond_the_end(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


def test_canary() -> None:
    x = torch.zeros(SIZE, device="cuda")
    _read_beyond_the_end[(1,)](x, torch.empty(128, device="cuda"), BLOCK=128)
    torch.cuda.synchronize()
