"""`nvcli bench plan`: what to expect of a model on a machine, without load."""

from __future__ import annotations

import typer  # noqa: TC002 - Typer reads the annotations

from nvcli.cli import bench_options as opts  # noqa: TC001 - Typer reads the annotations
from nvcli.cli import engine_options  # noqa: TC001
from nvcli.cli.bench_shared import check_positive, print_lines
from nvcli.cli.command import settings_of
from nvcli.cli.console import print_text
from nvcli.cli.engine_options import one_model
from nvcli.config import EngineConfig
from nvcli.errors import UsageError

EXAMPLES = """\
nvcli bench plan Qwen/Qwen3-8B --in-len 1024 --out-len 256 --rate 10
nvcli bench plan Qwen/Qwen3-8B --gpu H200           by its datasheet, without the GPU
nvcli bench plan Qwen/Qwen3-32B --gpu H200 --tp 2 --replicas 4   on eight of them
nvcli bench plan --explain                          the same in words"""


def plan(
    ctx: typer.Context,
    model_argument: engine_options.ModelArg = None,
    model: engine_options.ModelOpt = None,
    device: engine_options.DeviceOpt = None,
    dtype: engine_options.DTypeOpt = None,
    gpu_memory_utilization: engine_options.MemoryOpt = None,
    max_num_seqs: engine_options.MaxNumSeqsOpt = None,
    tensor_parallel_size: engine_options.TensorParallelOpt = None,
    replicas: opts.PlanReplicasOpt = 1,
    in_len: opts.InLenOpt = None,
    out_len: opts.OutLenOpt = None,
    rate: opts.RateOpt = None,
    arrival: opts.ArrivalOpt = None,
    gpu: opts.GpuOpt = None,
    explain: opts.ExplainOpt = False,
    json: opts.JsonOpt = False,
) -> int:
    """Predict without load: what fits, what binds, latency and throughput by concurrency or rate.

    Uses the calibration of 'nvcli bench latency' where there is one, else a datasheet.
    """
    check_positive(
        rate=rate,
        max_num_seqs=max_num_seqs,
        tensor_parallel_size=tensor_parallel_size,
        replicas=replicas,
    )
    if arrival is not None and rate is None:
        raise UsageError("--arrival is for an open loop; give --rate", param="arrival")
    if gpu is not None and device not in (None, "auto"):
        raise UsageError("--gpu and --device contradict each other", hint="Leave one out.")
    config = EngineConfig.from_options(
        model=one_model(ctx, model_argument, model),
        device=device,
        dtype=dtype,
        memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        tensor_parallel_size=tensor_parallel_size,
    )
    from nvcli.bench import plan as planning
    from nvcli.bench.planner import make_plan
    from nvcli.bench.record import dump

    found = make_plan(
        config.model,
        gpu=gpu,
        device=device,
        dtype=dtype,
        share=config.memory_utilization,
        slots=config.max_num_seqs,
        tensor_parallel_size=config.tensor_parallel_size,
        replicas=replicas,
        n_in=round(in_len.mean) if in_len else 128,
        lens=in_len.typical if in_len else (),
        n_out=round(out_len.mean) if out_len else 64,
    )
    found.rate = rate
    if arrival is not None:
        found.arrival_cv = arrival.cv
    if json:
        print_text(dump(planning.as_json(found)))
    else:
        print_lines(settings_of(ctx).screen(), planning.lines(found, explain=explain))
    return 0
