"""The all-reduce over each other's memory: its rules as a model, its source between processes in
the interpreter. On GPUs: `tests/engine/test_tp_cuda.py`.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvcli.parallel import MAX_SHORT_ROWS, short_rows
from tests.kernels.exchange_model import MUTATIONS, Rules, Wrong, explore
from tests.kernels.triton_testing import EPS, needs_triton, run_in_interpreter
from tests.waiting import PATIENCE_S

CPU = torch.device("cpu")
# ranks, type, columns, exchanges before the first: counts that are about to leave 16 and 31 bits
GROUPS = [
    (2, torch.float32, 40, 0),
    (3, torch.float32, 16, 2**31 - 4),
    (2, torch.float16, 1100, 2**16 - 4),
    (2, torch.bfloat16, 24, 5),
]
ROWS = 4
CHILD_S = int(PATIENCE_S)  # no process outlives it, whatever becomes of the test
Work = Callable[[int, Any], None]


@pytest.mark.parametrize(("ranks", "words", "exchanges"), [(2, 1, 6), (2, 2, 5), (3, 1, 4)])
def test_no_order_gives_a_wrong_word_or_a_wait_without_end(
    ranks: int, words: int, exchanges: int
) -> None:
    assert explore(Rules(), ranks, words, exchanges) > 100
    assert explore(Rules(numbers=4), ranks, words, exchanges) > 100  # 16 bits are plenty


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_rule_is_needed(name: str) -> None:
    with pytest.raises(Wrong):
        explore(MUTATIONS[name], ranks=2, words=2, exchanges=4)


@pytest.mark.torch
def test_how_many_rows_are_few() -> None:
    assert short_rows(2, 5120, 2) == 204
    assert short_rows(2, 5120, 4) == 102
    assert short_rows(8, 5120, 2) == 29
    assert short_rows(2, 64, 2) == MAX_SHORT_ROWS
    assert short_rows(8, 200_000, 4) == 0


@pytest.mark.torch
@needs_triton
def test_what_fits() -> None:
    sums = _sums(0, [0, 0], columns=4096, dtype=torch.bfloat16)
    row = torch.zeros(1, 4096, dtype=torch.bfloat16)
    assert sums.fits(row)
    assert sums.fits_norm(row)
    assert not sums.fits(row.repeat(ROWS + 1, 1))
    assert not sums.fits(row[:0])
    assert not sums.fits(row.float())
    assert not sums.fits(row.view(2, 2048))
    assert not sums.fits(row[0])
    assert not sums.fits(row.view(4096, 1).t().repeat(2, 1).t().contiguous().t())
    deterministic = _sums(0, [0, 0], columns=4096, dtype=torch.bfloat16, fuses_norm=False)
    assert deterministic.fits(row)
    assert not deterministic.fits_norm(row)
    short = _sums(0, [0, 0], columns=2048, dtype=torch.bfloat16)
    assert not short.fits_norm(row[:, :2048])  # the product after it norms for itself
    assert short.fits_norm(row[:, :2048].repeat(2, 1))


@needs_triton
@pytest.mark.interpret
@pytest.mark.parametrize("check", ["check_sums", "check_norms", "check_waits_end"])
def test_kernel_source_between_processes(check: str) -> None:
    run_in_interpreter("tests.kernels.test_all_reduce", check)


def compile_for_hopper() -> None:
    import triton

    from benchmarks.kernels.compile_ahead import NoGpu
    from nvcli.kernels import launch
    from nvcli.kernels.compiling import compiled_only

    triton.runtime.driver.set_active(NoGpu())
    launch.uses_pdl = lambda device: True
    with compiled_only(CPU, lambda kernel: None) as kernels:
        for size in (2, 8):
            inboxes = [(rank + 1) << 40 for rank in range(size)]
            sums = _sums(size - 1, inboxes, columns=2560, dtype=torch.bfloat16)
            x = torch.ones(ROWS, 2560, dtype=torch.bfloat16)
            sums.all_reduce(x)
            sums.all_reduce(x[:1])
            for residual in (x, None):
                sums.add_rms_norm(x, residual, x[0], 1e-6)
    assert len(kernels) == 6, "variants do not depend on the rank or the number of rows"
    for kernel in kernels.values():
        code = kernel.asm["ptx"]
        sent = [line for line in code.splitlines() if "st.global.wt" in line]
        looks = [line for line in code.splitlines() if "ld.volatile.global" in line]
        assert all(".v4.b32" in line for line in sent), sent  # 16 bytes, words of 4 each
        assert sum(".v4.b32" not in line for line in looks) == 2, looks  # the count, and `stop`
        wait = code.index("griddepcontrol.wait")
        assert code.index("griddepcontrol.launch_dependents") < wait
        assert wait < code.index(sent[0]) < code.index(looks[1])


@needs_triton
@pytest.mark.torch
def test_words_leave_whole_and_behind_the_wait(tmp_path: Path) -> None:
    code = f"from {__name__} import compile_for_hopper as f; f(); print('done')"
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (run.stdout, run.returncode) == ("done\n", 0), run.stderr


# --- in the interpreter --------------------------------------------------------------------------


def _sums(rank: int, inboxes: list[int], *, columns: int, dtype: torch.dtype, **more: Any) -> Any:
    from nvcli.kernels.all_reduce import ShortSums

    return ShortSums(rank, inboxes, rows=ROWS, columns=columns, dtype=dtype, device=CPU, **more)


def between_processes(size: int, dtype: torch.dtype, columns: int, before: int, work: Work) -> None:
    """work(rank, its sums) in a process for each rank, over inboxes in memory that they share."""
    from nvcli.kernels.all_reduce import ShortSums

    num_bytes = ShortSums.inbox_bytes(size, ROWS, columns, dtype)
    shared = [mmap.mmap(-1, num_bytes) for _ in range(size)]
    inboxes = [torch.frombuffer(memory, dtype=torch.uint8).data_ptr() for memory in shared]
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            signal.alarm(CHILD_S)
            code = 1
            try:
                sums = _sums(rank, inboxes, columns=columns, dtype=dtype)
                sums._count.fill_(before)
                work(rank, sums)
                code = 0
            except BaseException:  # noqa: BLE001 - the child ends here, whatever it was
                traceback.print_exc()
            os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * size


def parts_of(sums: Any, step: int) -> tuple[list[Tensor], Tensor]:
    """Every rank's part and their sum; whole numbers, which the interpreter's bfloat16 holds."""
    generator = torch.Generator().manual_seed(step)
    shape = (1 + step % ROWS, sums.columns)
    parts = [
        torch.randint(-40, 41, shape, generator=generator).to(sums.dtype) for _ in sums.inboxes
    ]
    return parts, torch.stack(parts).float().sum(0).to(sums.dtype)


def check_sums() -> None:
    """Every rank at its own pace; the rows differ from one exchange to the next."""

    def work(rank: int, sums: Any) -> None:
        pauses = random.Random(rank)
        for step in range(12):
            parts, expected = parts_of(sums, step)
            time.sleep(pauses.choice([0, 0, 0.002]))
            x = parts[rank].clone()
            assert sums.all_reduce(x) is x
            assert torch.equal(x, expected), (rank, step)
        assert not sums.gave_up

    for group in GROUPS:
        between_processes(*group, work)


def check_norms() -> None:
    from nvcli.kernels import reference

    def work(rank: int, sums: Any) -> None:
        for step in range(6):
            parts, expected = parts_of(sums, step)
            weight = torch.linspace(0.5, 2, sums.columns).to(sums.dtype)
            residual = None if step % 3 == 0 else parts[0]
            x = parts[rank].clone()
            normed, total = sums.add_rms_norm(x, residual, weight, EPS)
            wanted = expected if residual is None else expected + residual
            assert torch.equal(x, parts[rank])
            assert torch.equal(total, wanted), (rank, step)
            norm = reference.rms_norm(wanted, weight, EPS)
            tolerance = 1e-5 if sums.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(normed, norm, rtol=tolerance, atol=tolerance)

    for group in GROUPS[::3]:
        between_processes(*group, work)


def check_waits_end() -> None:
    """Whoever waits for a rank that is not there: until it is stopped, or has looked too often."""

    def too_long(rank: int, sums: Any) -> None:
        if rank == 1:
            return
        sums.limit = 64
        x = torch.ones(2, sums.columns)
        sums.all_reduce(x)
        assert sums.gave_up
        sums.limit = 1 << 30
        sums.all_reduce(x)  # what follows does not wait again

    def stopped(rank: int, sums: Any) -> None:
        if rank == 0:
            sums.stop()
            sums.all_reduce(torch.ones(2, sums.columns))
            assert not sums.gave_up

    from nvcli.kernels import all_reduce

    all_reduce.LOOKS = 32  # each takes its time here
    for work in (too_long, stopped):
        between_processes(2, torch.float32, 8, 0, work)
