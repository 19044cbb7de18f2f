"""Write the benchmark tables of README.md and docs/kernels.md from the rows: `python -m
benchmarks.tables`.

A table stands between `<!-- NAME -->` and `<!-- end NAME -->`; a test compares what is there with
what this would write.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from benchmarks import kernel_rates
from benchmarks.rows import RESULTS

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = RESULTS.parent.parent
PAGES = {"README.md": ("engine", "cpu_generate"), "docs/kernels.md": ("kernels",)}


def last_row(name: str) -> dict[str, Any]:
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def cpu_generate() -> str:
    row = last_row("cpu_generate")
    lines = ["| batch | nvcli tok/s | transformers tok/s | |", "|--:|--:|--:|--:|"]
    for batch, numbers in row["metrics"].items():
        lines.append(
            f"| {batch.removeprefix('batch_')} | {numbers['nvcli_tok_s']:.1f} "
            f"| {numbers['transformers_tok_s']:.1f} | {numbers['ratio']:.2f}x |"
        )
    return "\n".join([*lines, "", provenance(row)])


# metric of a workload, what it is called, and whether more is better
ENGINE_WORKLOADS = {
    "B": ("tpot_ms", "one stream, ms a token", False),
    "C8": ("tok_s", "8 streams, tokens/s", True),
    "C32": ("tok_s", "32 streams, tokens/s", True),
    "C64": ("tok_s", "64 streams, tokens/s", True),
    "C256": ("tok_s", "256 streams, tokens/s", True),
    "A": ("tok_s", "256 requests of mixed length, tokens/s", True),
    "D": ("prefill_tok_s", "64 prompts of 2,048, prompt tokens/s", True),
    "E": ("cold_s", "256 prompts sharing 2,048 tokens, s", False),
    "L": ("ttft_s", "one prompt of 32,768, s", False),
    "start": ("ready_s", "start to ready, s", False),
}


FAIR = 0.9


def engine() -> str:
    """nvcli beside vLLM on Qwen3-0.6B: of every workload the last `fair` run that had both."""
    table = ["| | nvcli | vLLM | factor |", "|---|--:|--:|--:|"]
    runs: dict[str, list[str]] = {}  # provenance -> what is from it
    pairs = fair(pairs_of("qwen3-0.6b"))
    for workload, (metric, name, is_rate) in ENGINE_WORKLOADS.items():
        pair = next(p for p in reversed(pairs) if all(_has(row, workload, metric) for row in p))
        ours, theirs = (row["metrics"][workload][metric] for row in pair)
        factor = ours / theirs if is_rate else theirs / ours
        table.append(f"| {name} | {_number(ours)} | {_number(theirs)} | {factor:.2f}x |")
        runs.setdefault(provenance(pair[0]), []).append(name.rpartition(", ")[0])
    (largest, _), *others = sorted(runs.items(), key=lambda run: -len(run[1]))
    lines = [largest, *(f"{'; '.join(names)}: {which}" for which, names in others)]
    return "\n".join([*table, "", "\n\n".join(lines)])


def pairs_of(model: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(nvcli's row, vLLM's) of each run of both, the newest last; they stand side by side."""
    lines = (RESULTS / "engine.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["config"]["model"] == model]
    return [
        (ours, theirs)
        for ours, theirs in itertools.pairwise(rows)
        if (ours["peer"], theirs["peer"]) == ("vllm", "nvcli")
    ]


def fair(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Those on hosts that suited vLLM: where its tokens/s of A were less than FAIR of its best,
    the host kept it back, and the factors would flatter us.
    """
    speeds = [theirs["metrics"]["A"]["tok_s"] for _, theirs in pairs if _has(theirs, "A", "tok_s")]
    least = FAIR * max(speeds, default=0.0)
    return [
        (ours, theirs)
        for ours, theirs in pairs
        if not _has(theirs, "A", "tok_s") or theirs["metrics"]["A"]["tok_s"] >= least
    ]


def _has(row: dict[str, Any], workload: str, metric: str) -> bool:
    return (row["metrics"].get(workload) or {}).get(metric) is not None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def provenance(row: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in row["versions"].items() if k in ("torch", "vllm"))
    return (
        f"{row['hardware']}; {versions}; {row['date'][:10]}, commit {row['commit']}; "
        f"`{row['command']}`"
    )


TABLES: dict[str, Callable[[], str]] = {
    "engine": engine,
    "cpu_generate": cpu_generate,
    "kernels": kernel_rates.table,
}


def fill(page: str, text: str) -> str:
    """`text` of the page with every table written anew. Raises `ValueError` where a marker is
    missing.
    """
    for name in PAGES[page]:
        start, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{page} has no table {name}")
        text = f"{before}{start}\n{TABLES[name]()}\n\n{end}{after}"
    return text


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(fill(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
