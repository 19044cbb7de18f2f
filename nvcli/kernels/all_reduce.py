"""Triton kernel: the sum over a group's ranks of rows too few for a library to be worth its start.

Each rank writes its part of a row straight into every other rank's memory, its *inbox*, and adds up
what lies in its own, in the order of the ranks. No flag follows the data, and nothing is fenced:
every element travels in a word of its own beside the number of the exchange, and words are written
whole. A word that has the number has arrived. (NCCL's low-latency protocol does the like.)

    inbox:  [2 slots, source ranks, rows, E] words
    word:   number << 16 | bits of a 16-bit element; or 32 and 32

A row has a program, and a count of its exchanges, in the device's memory: a captured graph that is
replayed counts on. Exchange k uses slot k % 2, and two slots are enough:

  * a rank writes exchange k + 2 after its own k + 1 ended, so after it had k + 1 from every peer
  * a peer sends k + 1 after its kernel of k ended, since it waits for the kernels before it
  * so when k + 2 is written over k, every reader of k is done

For the same reason a word holds exchange k or k - 2 when k is waited for (0 at first), and 16 bits
of number tell them apart for ever. `tests/kernels/exchange_model.py` tries every order in which two
and three ranks can run.

Who waits for a lost rank waits for ever; so the wait looks at `stop`, a word of the host's memory,
now and then: it ends when the host has set it (`STOPPED`), or sets it itself after so many looks
that something must be wrong (`GAVE_UP`). What comes out then is rubbish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from nvcli.kernels import tuned
from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

STOPPED, GAVE_UP = 1, 2
LOOKS = 1024  # at the inbox, for each at `stop`, which lies behind PCIe
LIMIT = 1 << 30  # looks of half a microsecond or more: about as long as NCCL is given


@triton.jit  # type: ignore[untyped-decorator]
def _receive(  # type: ignore[no-untyped-def]
    ptrs, mask, number, stop_ptr, limit, BITS: tl.constexpr, LOOKS: tl.constexpr
):
    """The words at ptrs, once all of them have the number."""
    words = tl.load(ptrs, mask=mask, other=0, volatile=True)
    is_missing = tl.max((mask & (words >> BITS != number)).to(tl.int32), axis=0)
    looks = 0
    while is_missing != 0:
        words = tl.load(ptrs, mask=mask, other=0, volatile=True)
        is_missing = tl.max((mask & (words >> BITS != number)).to(tl.int32), axis=0)
        looks += 1
        if looks % LOOKS == 0:
            if tl.load(stop_ptr, volatile=True) != 0:
                is_missing = 0
            elif looks >= limit:
                tl.store(stop_ptr, 2)  # GAVE_UP
                is_missing = 0
    return words


@triton.jit(do_not_specialize=["rank", "limit"])  # type: ignore[untyped-decorator]
def _all_reduce_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, E]
    residual_ptr,  # [T, E]
    weight_ptr,  # [E]
    out_ptr,  # [T, E]
    total_ptr,  # [T, E]
    count_ptr,  # [ROWS] int32
    stop_ptr,  # [1] int32
    inboxes,  # SIZE addresses
    rank,
    limit,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. What depends on nothing that runs before.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    BITS: tl.constexpr = TYPE.primitive_bitwidth
    ELEMENT: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint32
    WORD: tl.constexpr = tl.uint32 if BITS == 16 else tl.uint64
    row = tl.program_id(0)
    columns = tl.arange(0, E_POW2)
    mask = columns < E
    weight = tl.zeros([E_POW2], tl.float32)
    if HAS_NORM:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # 2. To every inbox. This rank's own could be left out, but Triton 3.6 does not compile that
    # branch for eight ranks.
    count = tl.load(count_ptr + row, volatile=True) + 1
    number = count.to(ELEMENT).to(WORD)
    x = tl.load(x_ptr + row * E + columns, mask=mask, other=0.0)
    residual = tl.zeros([E_POW2], tl.float32)
    if HAS_RESIDUAL:
        residual += tl.load(residual_ptr + row * E + columns, mask=mask, other=0.0).to(tl.float32)
    mine = number << BITS | x.to(ELEMENT, bitcast=True).to(WORD)
    slot = (count & 1) * SIZE  # not %: the count may have become negative
    to = ((slot + rank) * ROWS + row) * E + columns
    own = inboxes[0].to(tl.int64)
    for peer in tl.static_range(SIZE):
        address = inboxes[peer].to(tl.int64)
        own = tl.where(peer == rank, address, own)
        inbox = tl.multiple_of(address.to(tl.pointer_type(WORD)), 16)
        tl.store(inbox + to, mine, mask=mask, cache_modifier=".wt")

    # 3. All parts in the order of the ranks, so that all ranks get the same bits.
    inbox = tl.multiple_of(own.to(tl.pointer_type(WORD)), 16)
    total = tl.zeros([E_POW2], tl.float32)
    for source in range(SIZE):
        words = mine
        if source != rank:
            at = ((slot + source) * ROWS + row) * E + columns
            words = _receive(inbox + at, mask, number, stop_ptr, limit, BITS, LOOKS)
        total += words.to(ELEMENT).to(TYPE, bitcast=True).to(tl.float32)
    tl.debug_barrier()  # every warp has read the count
    tl.store(count_ptr + row, count)

    # 4. Rounded at each step, as it is where the steps are kernels of their own.
    total = total.to(TYPE)
    if HAS_RESIDUAL:
        total = (total.to(tl.float32) + residual).to(TYPE)
    tl.store(total_ptr + row * E + columns, total, mask=mask)
    if HAS_NORM:
        y = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(y * y, axis=0) / E + eps)
        tl.store(out_ptr + row * E + columns, y * scale * weight, mask=mask)


class ShortSums:
    """One rank's end. The calls of all ranks are the same, in the same order; they enqueue on the
    current stream and can be captured in a CUDA graph. Implements `nvcli.parallel.ShortSums`.
    """

    def __init__(
        self,
        rank: int,
        inboxes: Sequence[int],
        *,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        fuses_norm: bool = True,
        memory: Any = None,
    ) -> None:
        """
        Args:
            inboxes: every rank's, as addresses that this one can write to; zeros of `inbox_bytes`.
            rows, columns: of the largest x, and of every x.
            dtype: of every x; 16 or 32 bits.
            fuses_norm: whether `add_rms_norm` is used. Its norm adds up in an order of its own.
            memory: that the inboxes lie in; closed by `close`.
        """
        self.rank = rank
        self.inboxes = tuple(inboxes)
        self.rows, self.columns, self.dtype = rows, columns, dtype
        self.limit = LIMIT
        self._fuses_norm = fuses_norm
        self._memory = memory
        self._count = torch.zeros(rows, dtype=torch.int32, device=device)
        is_cuda = device.type == "cuda"
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)  # kernels read it there
        self._stop_word = self._stop.numpy()  # looked at once a step

    @staticmethod
    def inbox_bytes(size: int, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Of one rank's inbox in a group of so many."""
        return 2 * size * rows * columns * 2 * dtype.itemsize

    def fits(self, x: Tensor) -> bool:
        """Whether x [T, E] can be summed here."""
        return (
            0 < x.shape[0] <= self.rows
            and x.shape[1:] == (self.columns,)
            and x.dtype == self.dtype
            and x.is_contiguous()
        )

    def fits_norm(self, x: Tensor) -> bool:
        """Whether x can be summed and normed in one: where the norm is no part of the product that
        comes after it.
        """
        return (
            self._fuses_norm
            and self.fits(x)
            and tuned.choose_with_norm("linear", x.shape[0], self.columns) is None
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, written to x [T, E], of which `fits` is true."""
        self._launch(x, None, None, 0.0, x, x)
        return x

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(s), s), with s the sum of all ranks' x and of the residual.

        x:         [T, E], of which `fits_norm` is true; stays as it is
        residual:  [T, E], contiguous, the same on all ranks, or None
        weight:    [E]
        """
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._launch(x, residual, weight, eps, out, total)
        return out, total

    def stop(self) -> None:
        """End all waits, now and in future; what is summed then is rubbish. From any thread."""
        self._stop_word[0] = STOPPED

    @property
    def gave_up(self) -> bool:
        """Whether a wait that has ended lasted too long."""
        return bool(self._stop_word[0] == GAVE_UP)

    def close(self) -> None:
        """Give the memory back. Nothing may be summed any more, by a captured graph either."""
        if self._memory is not None:
            self._memory.close()

    def _launch(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        out: Tensor,
        total: Tensor,
    ) -> None:
        assert self.fits(x), "what does not fit is for the library"
        assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
        _all_reduce_kernel[(x.shape[0],)](
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            out,
            total,
            self._count,
            self._stop,
            self.inboxes,
            self.rank,
            self.limit,
            eps,
            SIZE=len(self.inboxes),
            ROWS=self.rows,
            E=self.columns,
            E_POW2=triton.next_power_of_2(self.columns),
            HAS_NORM=weight is not None,
            HAS_RESIDUAL=residual is not None,
            LOOKS=LOOKS,
            **launch_options(x.device, num_warps=4 if self.columns <= 2048 else 8),
        )
