"""How kernels are launched: programmatic dependent launch where the device has it.

With it a kernel's programs start as soon as its predecessor has let them, and wait in `gdc_wait`
until everything the predecessor wrote is visible. Rules every kernel here follows:

  * `gdc_launch_dependents` stands first, so that the next kernel can be placed early
  * before `gdc_wait` a kernel reads only what no kernel of its step writes, and writes nothing
  * every kernel waits, so the chain is complete: when a kernel passes its wait, all before it
    ended. Programs with nothing to do may end without waiting, where at least one of the kernel's
    programs waits: a kernel ends when all of its programs have

What no kernel of its step writes: weights and scales of the cache, anywhere. In a captured step
also what was written before its graph was launched, since a graph begins when all that was enqueued
before it has ended, and ends with its last kernel:

  * `StepTensors.rows`, which the host's copy writes, and nothing that is derived from it in the
    graph (`seq_lens`, `slots`, `slot_mapping`, lists of work)
  * block tables, which a plan's deltas write, but for the entry of a block that a row brings: that
    one the step writes, and whoever needs it early takes the block from the row
  * keys and values of a row's positions before `start`, unless the row's flags have `READS_NEW`.
    In a step a row stores at its positions from `start` on, in blocks of its own that had no name
    when the step was planned, so that nobody could share them. But planning a step gives names to
    the blocks that it fills, and a sequence that the same plan admits may begin with such a block:
    `GraphRunner` flags the rows of sequences that a plan admits

It changes when a kernel starts and never what it computes: results are bitwise equal on and off.
`NVCLI_PDL=0` in the environment, or `set_pdl(False)`, turns it off.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from nvcli.kernels import switches

_use_pdl = switches.is_on("NVCLI_PDL")


def set_pdl(enabled: bool) -> None:
    """For tests and measurements; graphs that were captured keep what they have."""
    global _use_pdl
    _use_pdl = enabled


@lru_cache
def _has_pdl(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


def uses_pdl(device: torch.device) -> bool:
    return _use_pdl and device.type == "cuda" and _has_pdl(device.index or 0)


def launch_options(device: torch.device, *, num_warps: int, **more: Any) -> dict[str, Any]:
    """The keyword arguments of a launch: warps, stages, and PDL for the kernel and the driver."""
    is_pdl = uses_pdl(device)
    options: dict[str, Any] = {"num_warps": num_warps, "PDL": is_pdl, **more}
    if is_pdl:
        options["launch_pdl"] = True
    return options
