"""L_max: how many requests each resource allows at once, and which one binds."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from typing import Any

from nvcli.engine.buckets import decode_buckets

SPARE_HANDLES = 64  # files, sockets and libraries a server has open beside its streams


def limit_rows(
    *,
    num_blocks: int,
    block_size: int,
    slots: int,
    n_in: float,
    n_out: float,
    prefix: float = 0,
    groups: int = 1,
    handles: int | None = None,
    backlog: int | None = None,
    cpu_s_per_token: float | None = None,
    tokens_per_s: float | None = None,
) -> list[dict[str, Any]]:
    """A row a resource: what a request needs, the limit, how many that allows.

    `prefix` tokens are shared by all of a group and counted once for each. Handles and backlog are
    this machine's unless a run stored its own. KV: the mean request holds half of its
    answer and half a block (`KV, on average`); `KV, never preempting` fits all at full length.
    """
    own = n_in + n_out - prefix
    shared = math.ceil(prefix / block_size) * groups
    tokens = max(num_blocks - shared, 0) * block_size
    mean_need = n_in - prefix + n_out / 2 + block_size / 2
    full_need = max(math.ceil(own / block_size), 1)
    handles = open_files_left() if handles is None else handles
    backlog = listen_backlog() if backlog is None else backlog
    rows: list[dict[str, Any]] = [
        _row("KV, on average", f"{mean_need:.0f} tokens", f"{tokens:,} tokens", tokens / mean_need),
        _row(
            "KV, never preempting",
            f"{full_need} blocks",
            f"{num_blocks - shared:,} blocks",
            max(num_blocks - shared, 0) // full_need,
            is_hard=False,
        ),
        _row("sequence slots", "1 slot", f"{slots:,} slots", slots),
        _row("connections", "1 in the backlog", f"{backlog:,}", backlog, is_hard=False),
        _row("handles", "1 file", f"{handles:,} files", handles),
    ]
    if cpu_s_per_token and tokens_per_s:
        rows.append(
            _row(
                "load client's CPU",
                f"{cpu_s_per_token * 1e6:.0f} us a token",
                "1 s a second",
                1 / (tokens_per_s * cpu_s_per_token),
            )
        )
    return rows


def resources(*, num_blocks: int, block_size: int, slots: int) -> dict[str, int]:
    """What a run stores, so that its table can be made with the lengths that were measured."""
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "slots": slots,
        "handles": open_files_left(),
        "backlog": listen_backlog(),
    }


def _row(
    resource_name: str, need: str, limit: str, allows: float, *, is_hard: bool = True
) -> dict[str, Any]:
    return {
        "resource": resource_name,
        "need": need,
        "limit": limit,
        "allows": math.floor(allows) if is_hard else None,
        "soft": None if is_hard else math.floor(allows),
    }


def open_files_left() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        soft = 2**20
    used = SPARE_HANDLES
    with contextlib.suppress(OSError):
        used = max(used, len(os.listdir("/proc/self/fd")))
    return max(soft - used, 0)


def listen_backlog() -> int:
    """What the kernel grants of the server's listen backlog of 2048."""
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/core/somaxconn") as file:
        return min(int(file.read()), 2048)
    return 128


def binding(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The hard row that allows least."""
    return min((r for r in rows if r["allows"] is not None), key=lambda r: r["allows"])


def safe_slots(load: float) -> int:
    """Slots for a mean load L: L + 3 sqrt(L)."""
    return math.ceil(load + 3 * math.sqrt(load))


def graph_size(slots: int) -> int:
    """Rounded up to a batch that is captured as a CUDA graph whatever `max_num_seqs` is."""
    return next(size for size in decode_buckets(slots + 16) if size >= slots)
