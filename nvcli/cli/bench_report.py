"""`nvcli bench report` and `compare`: stored runs, without measuring anything."""

from __future__ import annotations

import typer  # noqa: TC002 - Typer reads the annotations

from nvcli.cli import bench_options as opts  # noqa: TC001 - Typer reads the annotations
from nvcli.cli.bench_bundles import OutputOptions  # noqa: TC001
from nvcli.cli.bench_shared import print_lines, show
from nvcli.cli.bundles import bundled
from nvcli.cli.command import settings_of
from nvcli.cli.console import print_text
from nvcli.errors import UsageError

REPORT_EXAMPLES = """\
nvcli bench report last                       the run that was stored last
nvcli bench report a1f3c2 --json | jq .ttft_ms
nvcli bench report run.jsonl --out run.html --out run.png
nvcli bench report --define                   every definition"""

COMPARE_EXAMPLES = """\
nvcli bench compare before.jsonl after.jsonl
nvcli bench compare A B --gate 'e2e.p99<=+5%' --gate 'out_tok_s>=-3%' --gate 'goodput>=0.95'"""


@bundled
def report(
    ctx: typer.Context,
    *,
    run: opts.RunArg = None,
    define: opts.DefineOpt = False,
    output: OutputOptions,
) -> int:
    """Compute every number of a stored run again, and show it.

    Exit 5: a limit was missed. Exit 6: the measurement is not sound.
    """
    if define:
        from nvcli.bench.metrics import DEFINITIONS
        from nvcli.bench.text import entries

        print_lines(settings_of(ctx).screen(), entries(DEFINITIONS))
        return 0
    if run is None:
        raise UsageError("name a run", hint="'nvcli bench report last' shows the last one.")
    from nvcli.bench.record import find_run

    return show(settings_of(ctx).screen(), find_run(run), output)


def compare(
    ctx: typer.Context,
    a: opts.AArg,
    b: opts.BArg,
    gate: opts.GateOpt = None,
    lenient: opts.LenientOpt = False,
    any_workload: opts.AnyWorkloadOpt = False,
    json: opts.JsonOpt = False,
) -> int:
    """Whether B differs from A, with confidence; gates decide the exit code.

    Exit 5: a gate failed. Exit 6: not sound, workloads differ, or a gate stays open.
    """
    from nvcli.bench import compare as comparing
    from nvcli.bench.gates import parse_gate
    from nvcli.bench.record import dump, find_run, read_runs

    gates = [parse_gate(text) for text in gate or ()]
    found = comparing.compare(
        read_runs(find_run(a)), read_runs(find_run(b)), gates, any_workload=any_workload
    )
    if json:
        print_text(dump({"comparisons": comparing.as_json(found)}))
    else:
        print_lines(settings_of(ctx).screen(), comparing.table(found))
    return comparing.exit_code(found, is_lenient=lenient)
