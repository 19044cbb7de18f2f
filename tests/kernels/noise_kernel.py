"""A kernel that only writes the sampling kernels' noise out; importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from nvcli.kernels.sampling_parts import gumbel, uniform


@triton.jit
def noise_kernel(keys_ptr, uniforms_ptr, gumbels_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    ids = tl.arange(0, SIZE)
    key = tl.load(keys_ptr + row)
    tl.store(uniforms_ptr + row * SIZE + ids, uniform(key, ids))
    tl.store(gumbels_ptr + row * SIZE + ids, gumbel(key, ids))
