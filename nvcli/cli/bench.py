"""`nvcli bench`: the verbs, their options, and what they print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvcli.cli.app import Command, Group, settings_of
from nvcli.cli.console import print_text
from nvcli.cli.options import ARGUMENTS, INPUT, OUTPUT, _option
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.bench.record import Run
    from nvcli.bench.summary import Summary
    from nvcli.repl.screen import Screen


class BenchGroup(Group):
    examples = """\
nvcli bench report last                            the last run again, from its samples
nvcli bench report last --out run.html             as a page, .png, .csv, .md, .json, .hgrm
nvcli bench compare A B --gate 'e2e.p99<=+5%'      two runs; exit 5 when the gate fails"""


class ReportCommand(Command):
    examples = """\
nvcli bench report last                       the run that was stored last
nvcli bench report a1f3c2 --json | jq .ttft_ms
nvcli bench report run.jsonl --out run.html --out run.png
nvcli bench report --define                   every definition"""


class CompareCommand(Command):
    examples = """\
nvcli bench compare before.jsonl after.jsonl
nvcli bench compare A B --gate 'e2e.p99<=+5%' --gate 'out_tok_s>=-3%' --gate 'goodput>=0.95'"""


bench_app = typer.Typer(cls=BenchGroup, rich_markup_mode=None, add_completion=False)

OutOpt = Annotated[
    list[Path] | None,
    _option(
        "--out",
        metavar="FILE",
        group=OUTPUT,
        help="Write .json .jsonl .csv .md .html .png or .hgrm, by its suffix; may be given again.",
    ),
]
JsonOpt = Annotated[
    bool, _option("--json", group=OUTPUT, help="One object with every number, stable names.")
]
RunArg = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        show_default=False,
        rich_help_panel=ARGUMENTS,
        help="A .jsonl file, the id of a stored run, or last.",
    ),
]
DefineOpt = Annotated[
    bool, _option("--define", group=OUTPUT, help="Print how every number is defined.")
]
AArg = Annotated[str, typer.Argument(metavar="A", help="The run to compare with.")]
BArg = Annotated[str, typer.Argument(metavar="B", help="The run in question.")]
GateOpt = Annotated[
    list[str] | None,
    _option(
        "--gate",
        metavar="RULE",
        group=INPUT,
        help="e2e.p99<=+5%, out_tok_s>=-3%, ttft.p99<=300ms, goodput>=0.95; may be given again.",
    ),
]
LenientOpt = Annotated[
    bool,
    _option("--lenient", group=INPUT, help="A gate that nothing can be said about passes."),
]
AnyWorkloadOpt = Annotated[
    bool, _option("--any-workload", group=INPUT, help="Compare although the workloads differ.")
]


@bench_app.callback(invoke_without_command=True)
def bench(ctx: typer.Context) -> None:
    """Measure, explain and predict latency."""
    if ctx.invoked_subcommand is None:
        print_text(ctx.get_help())


@bench_app.command(cls=ReportCommand)
def report(
    ctx: typer.Context,
    run: RunArg = None,
    define: DefineOpt = False,
    out: OutOpt = None,
    json: JsonOpt = False,
) -> int:
    """Compute every number of a stored run again, and show it.

    Exit 5: a limit was missed. Exit 6: the measurement is not sound.
    """
    if define:
        from nvcli.bench.metrics import DEFINITIONS

        print_text(DEFINITIONS)
        return 0
    if run is None:
        raise UsageError("name a run", hint="'nvcli bench report last' shows the last one.")
    from nvcli.bench.record import find_run

    return show(settings_of(ctx).screen(), find_run(run), as_json=json, out=out or ())


@bench_app.command(cls=CompareCommand)
def compare(
    ctx: typer.Context,
    a: AArg,
    b: BArg,
    gate: GateOpt = None,
    lenient: LenientOpt = False,
    any_workload: AnyWorkloadOpt = False,
    json: JsonOpt = False,
) -> int:
    """Whether B differs from A, with confidence; gates decide the exit code.

    Exit 5: a gate failed. Exit 6: not sound, workloads differ, or a gate stays open.
    """
    from nvcli.bench import compare as comparing
    from nvcli.bench.record import dump, find_run, read_runs

    gates = [comparing.parse_gate(text) for text in gate or ()]
    found = comparing.compare(
        read_runs(find_run(a)), read_runs(find_run(b)), gates, any_workload=any_workload
    )
    if json:
        print_text(dump({"comparisons": comparing.as_json(found)}))
    else:
        print_lines(settings_of(ctx).screen(), comparing.table(found))
    return comparing.exit_code(found, is_lenient=lenient)


# --- what the verbs share ------------------------------------------------------------------------


def show(screen: Screen, path: Path, *, as_json: bool, out: Sequence[Path]) -> int:
    """Print a stored file's report, write what was asked for; the exit code."""
    from nvcli.bench import export
    from nvcli.bench.record import read_runs
    from nvcli.bench.summary import summarize

    for target in out:
        export.check_suffix(target)
    runs: list[Run] = read_runs(path)
    summaries: list[Summary] = [summarize(run) for run in runs]
    for target in out:
        export.write(target, path, runs, summaries)
    if as_json:
        print_text(export.report_json(summaries))
    elif not screen.is_quiet:
        from nvcli.bench.card import card

        for index, summary in enumerate(summaries):
            print_lines(screen, [*([""] if index else []), *card(summary)])
    if any(s.unsound for s in summaries):
        return 6
    return 5 if any(s.missed for s in summaries) else 0


def print_lines(screen: Screen, lines: Sequence[str]) -> None:
    """Text on standard output; plain ASCII where its encoding holds no more."""
    from nvcli.bench.card import to_ascii
    from nvcli.repl.screen import visible

    text = visible("\n".join(lines))
    encoding = getattr(screen.out, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = to_ascii(text)
    screen.write(text + "\n")


def register(app: typer.Typer) -> None:
    """Add the commands to the root."""
    app.add_typer(bench_app, name="bench")
