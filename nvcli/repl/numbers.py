"""Numbers as the status line prints them, and the lines that are made of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from nvcli.types import FinishReason, RequestOutput

if TYPE_CHECKING:
    from nvcli.engine.startup import StartupReport


SEPARATOR = " · "  # of the status line; lines break there


def short_count(count: int) -> str:
    """A token count in few characters, in the units limits come in: 812, 2.1k, 32k."""
    if count < 1024:
        return str(count)
    thousands = count / 1024
    return f"{thousands:.1f}k" if thousands < 9.95 and count % 1024 else f"{thousands:.0f}k"


def spaced(count: int) -> str:
    return f"{count:,}".replace(",", " ")


def startup_lines(report: StartupReport, *, with_stages: bool = True) -> list[str]:
    """What `-v` and `/show model` tell: where it runs, what it holds, what took how long."""
    tokens = report.num_blocks * report.block_size
    num_ranks = report.tensor_parallel_size
    where, each = report.device, ""
    if num_ranks > 1:
        where, each = f"{num_ranks} x {report.device} (sums: {report.all_reduce})", " each"
    kind, weights_kind = (
        "" if dtype == report.dtype else f" in {dtype}"
        for dtype in (report.kv_cache_dtype, report.weights_dtype)
    )
    mode = ", deterministic" if report.deterministic else ""
    lines = [
        f"{where}, {report.dtype}{mode}, attention {report.attention_backend}"
        f" ({report.attention_reason})",
        f"weights{weights_kind} {report.weights_bytes / 2**30:.2f} GiB,"
        f" KV cache {report.pool_bytes / 2**30:.2f} GiB{each}{kind} for {spaced(tokens)} tokens",
    ]
    if report.num_kernels:
        lines.append(
            f"{report.num_kernels} kernels, {report.num_graphs} CUDA graphs of"
            f" {report.graph_bytes / 2**20:.0f} MiB"
        )
    stages = [f"{name} {seconds:.2f} s" for name, seconds in report.stage_s.items()]
    return [*lines, ", ".join(stages)] if stages and with_stages else lines


def context_meter(used: int, limit: int) -> str:
    return f"ctx {short_count(used)}/{short_count(limit)} ({100 * used / max(limit, 1):.0f} %)"


def ended_now(output: RequestOutput) -> RequestOutput:
    """An interrupted answer, which nobody else gives an end: so that it has a speed as well."""
    if output.times is None or output.times.finished is not None:
        return output
    return replace(output, times=replace(output.times, finished=time.monotonic()))


def emptiness(output: RequestOutput) -> str | None:
    """Why nothing is to be seen, where that is so."""
    if output.text.strip() or output.tool_calls or output.finish_reason is FinishReason.ERROR:
        return None
    if output.finish_reason is FinishReason.LENGTH and output.reasoning:
        return "the answer is empty: the token limit came while the model thought"
    return "the answer is empty"


def statistics_line(output: RequestOutput, limit: int, *, is_interrupted: bool = False) -> str:
    """`412 tok · 96.1 tok/s · TTFT 38 ms · ctx 2.1k/32k (6 %) · cached 1 830 tok · stop`."""
    usage, times = output.usage, output.times
    parts = [f"{spaced(usage.completion_tokens)} tok"]
    speed = times.tokens_per_s(usage.completion_tokens) if times else None
    if speed is not None:
        parts.append(f"{speed:.1f} tok/s")
    if times is not None and times.ttft_s is not None:
        parts.append(f"TTFT {times.ttft_s * 1e3:.0f} ms")
    parts.append(context_meter(usage.total_tokens, limit))
    if usage.cached_tokens:
        parts.append(f"cached {spaced(usage.cached_tokens)} tok")
    reason = output.finish_reason
    parts.append("interrupted" if is_interrupted else str(reason or FinishReason.ABORT))
    return SEPARATOR.join(parts)
