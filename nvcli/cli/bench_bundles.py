"""Options that the verbs of `nvcli bench` take together, each bundle as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvcli.cli import bench_options as opts  # noqa: TC001 - Typer reads the annotations
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from nvcli.bench.workload import Workload


@dataclass
class WorkloadOptions:
    """What is sent."""

    in_len: opts.InLenOpt = None
    out_len: opts.OutLenOpt = None
    data: opts.DataOpt = "random"
    prefix: opts.PrefixOpt = None
    cache: opts.CacheOpt = "cold"
    turns: opts.TurnsOpt = 1
    seed: opts.BenchSeedOpt = 0

    def workload(self) -> Workload:
        """Raises `UsageError`, also for a file of prompts that is none: before a model loads."""
        from nvcli.bench.prompts import read_prompts
        from nvcli.bench.workload import Lengths, Workload

        if self.data != "random" and self.in_len is not None:
            raise UsageError("--in-len is for --data random; a file has its own prompts")
        found = Workload(
            in_len=self.in_len or Lengths.parse("128"),
            out_len=self.out_len or Lengths.parse("64"),
            data=self.data,
            prefix=self.prefix,
            seed=self.seed,
            cache=self.cache,
            turns=self.turns,
        )
        if self.data != "random":
            if self.prefix is not None:
                raise UsageError("--prefix is for --data random")
            read_prompts(self.data)
        return found


@dataclass
class ClientOptions:
    """How a load over HTTP is watched and judged."""

    warmup: opts.WarmupOpt = "auto"
    slo: opts.SloOpt = None
    timeout: opts.TimeoutOpt = 300.0
    served_model_name: opts.ServedModelOpt = None
    gpu_metrics: opts.GpuMetricsOpt = False


@dataclass
class OutputOptions:
    """What becomes of the numbers."""

    out: opts.OutOpt = None
    json: opts.JsonOpt = False

    def check(self, *, has_requests: bool = True) -> None:
        """Raises `UsageError` for a file that cannot be written: before anything is measured."""
        if self.out:
            from nvcli.bench.export import check_target

            for target in self.out:
                check_target(target, has_requests=has_requests)
