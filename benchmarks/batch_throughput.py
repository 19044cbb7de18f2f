"""`nvcli batch` beside `LLM.generate`: the same records, the same engine, one process.

    python -m benchmarks.batch_throughput qwen3-0.6b --records 10000 --max-output 384
    python -m benchmarks.batch_throughput demo --records 200 --max-input 64 --max-output 32

MODEL may be a shape's name: random weights, and prompts are token ids. With
`--tokenizer FOLDER` (or a tokenizer in MODEL) they are text, and both sides tokenize it. Lengths
are uniform from 1/16 of the maximum up; every output runs to its length. Each pass has prompts of
its own, so that no pass meets another's prefix cache; within a pass, `--prefix N` gives the records
of a group N tokens in common. Passes alternate; the value is the median of the ratios of each pair.

Prints a card to standard error; the row goes to `benchmarks/results/` and to standard output.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine.workloads import SHAPES, write_shape
from benchmarks.rows import write_row
from benchmarks.simulated import install
from nvcli.batch.dry_run import dry_run
from nvcli.batch.job import run_job
from nvcli.batch.options import BatchOptions, Order, ProgressMode
from nvcli.batch.progress import Progress
from nvcli.config import EngineConfig
from nvcli.llm import LLM

if TYPE_CHECKING:
    from nvcli.batch.progress import Counts
    from nvcli.types import SamplingParams

TARGET = 0.97  # of LLM.generate's tokens per second


@dataclass
class Pass:
    seconds: float
    completion_tokens: int
    cached_tokens: int
    cpu_s: float  # of all threads
    estimate_s: float | None = None  # the dry run's, which knows one H200
    eta: list[tuple[float, float]] = field(default_factory=list)  # elapsed, said to be left

    def eta_errors(self) -> dict[str, float]:
        """What the live ETA said the whole would take, over what it took, by the share done."""
        errors: dict[str, float] = {}
        for share in (0.05, 0.1, 0.25, 0.5, 0.75, 0.9):
            later = [(e, left) for e, left in self.eta if e >= share * self.seconds]
            if later:
                elapsed, left = later[0]
                errors[f"{share:.0%}"] = round((elapsed + left) / self.seconds - 1, 3)
        return errors

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.seconds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json: text prompts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--max-input", type=int, default=512)
    parser.add_argument("--max-output", type=int, default=512)
    parser.add_argument("--prefix", type=int, default=0, help="tokens that a group has in common")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--order", default="input", choices=list(Order))
    parser.add_argument("--window", type=int)
    parser.add_argument("--passes", type=int, default=1, help="of each side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--simulate", type=float, metavar="MS", help="no model: a device with steps of MS ms"
    )
    parser.add_argument(
        "--simulate-ops", type=int, default=0, help="kernels of a step; 0: one captured graph"
    )
    return parser.parse_args()


def make_records(
    args: argparse.Namespace, llm: LLM, vocab_size: int, seed: int
) -> list[dict[str, Any]]:
    """The lengths depend on `--seed` only, the tokens on the pass."""
    lengths, tokens = random.Random(args.seed), random.Random(f"{args.seed} {seed}")
    has_tokenizer = args.has_tokenizer
    prefixes = [
        [tokens.randrange(vocab_size) for _ in range(args.prefix)] for _ in range(args.groups)
    ]
    records = []
    for number in range(args.records):
        num_input = lengths.randint(max(1, args.max_input // 16), args.max_input)
        num_output = lengths.randint(max(1, args.max_output // 16), args.max_output)
        ids = prefixes[number % args.groups] + [
            tokens.randrange(vocab_size) for _ in range(num_input)
        ]
        record: dict[str, Any] = {"id": str(number), "max_tokens": num_output, "ignore_eos": True}
        record["prompt"] = llm.tokenizer.decode(ids) if has_tokenizer else ids
        if has_tokenizer:
            record["raw"] = True
        records.append(record)
    return records


def generate_pass(llm: LLM, records: list[dict[str, Any]]) -> Pass:
    prompts = [record["prompt"] for record in records]
    base = llm.sampling()
    params: list[SamplingParams] = [
        base.replace(max_tokens=record["max_tokens"], ignore_eos=True, seed=number)
        for number, record in enumerate(records)
    ]
    start, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} prompts failed, the first: {failed[0]}")
    return Pass(
        seconds,
        sum(output.usage.completion_tokens for output in outputs),
        sum(output.usage.cached_tokens for output in outputs),
        cpu,
    )


class WatchedProgress(Progress):
    """Keeps what the ETA said, twenty times a second."""

    def __init__(self) -> None:
        super().__init__(ProgressMode.AUTO, sys.stderr)
        self.said: list[tuple[float, float]] = []

    def update(self, counts: Counts) -> None:
        elapsed = counts.elapsed_s
        if not self.said or elapsed > self.said[-1][0] + 0.05:
            eta = counts.eta_s
            if eta is not None:
                self.said.append((elapsed, eta))
        super().update(counts)


class KeptOpen:
    """The engine for a batch job that must not close it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def close(self) -> None:
        pass


def batch_pass(
    llm: LLM, args: argparse.Namespace, records: list[dict[str, Any]], folder: Path
) -> Pass:
    """The whole job: pre-scan, reading, writing, all but loading the model."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    stats_file = folder / "stats.json"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = BatchOptions(
        input=str(source),
        output=output,
        force=True,
        order=Order(args.order),
        window=args.window,
        seed=args.seed,
        stats_json=stats_file,
    )
    tokenizer = llm.tokenizer if args.has_tokenizer else None
    estimate_s = dry_run(options, llm.model_config, tokenizer, llm.max_model_len).estimate_s
    progress = WatchedProgress()
    start, cpu = time.perf_counter(), time.process_time()
    code = run_job(
        options,
        llm.config,
        find_model=lambda: folder,
        load=lambda: KeptOpen(llm),  # type: ignore[return-value, arg-type]
        progress=progress,
    )
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    if code != 0:
        raise SystemExit(f"the batch ended with {code}")
    with output.open("rb") as file:
        if sum(1 for _ in file) != len(records):
            raise SystemExit("the batch lost records")
    usage = json.loads(stats_file.read_text())["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Pass(seconds, usage["completion_tokens"], cached, cpu, estimate_s, progress.said)


def with_tokenizer(model: str, tokenizer: Path | None, folder: Path) -> str:
    """A folder with the model's configuration and another's tokenizer."""
    if tokenizer is None:
        return model
    target = folder / "model"
    target.mkdir()
    for source in (Path(model), tokenizer):
        for file in source.iterdir():
            is_tokenizer = "token" in file.name or file.suffix == ".jinja"
            if file.is_file() and is_tokenizer == (source == tokenizer):
                shutil.copy(file, target / file.name)
    return str(target)


def main() -> None:
    args = arguments()
    if args.simulate is not None:
        install(args.simulate / 1000, args.simulate_ops)
    with tempfile.TemporaryDirectory(prefix="nvcli-bench-") as name:
        folder = Path(name)
        model = args.model
        if model in SHAPES:
            model = write_shape(folder / "random", model)
        config = EngineConfig.from_options(
            model=with_tokenizer(model, args.tokenizer, folder),
            load_format="dummy" if args.model in SHAPES else "auto",
            device=args.device,
            dtype=args.dtype,
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
        )
        with LLM(config=config) as llm:
            sides = measure(llm, args, folder)
            report(args, llm, sides)


def measure(llm: LLM, args: argparse.Namespace, folder: Path) -> dict[str, list[Pass]]:
    from nvcli.errors import TokenizerError

    vocab_size = llm.model_config.vocab_size
    try:
        vocab_size = min(vocab_size, llm.tokenizer.size)
        args.has_tokenizer = True
    except TokenizerError:
        args.has_tokenizer = False
    warm = argparse.Namespace(**{**vars(args), "records": min(args.records, 64)})
    generate_pass(llm, make_records(warm, llm, vocab_size, -1))
    batch_pass(llm, warm, make_records(warm, llm, vocab_size, -2), folder)
    sides: dict[str, list[Pass]] = {"generate": [], "batch": []}
    for number in range(args.passes):
        for offset, side in enumerate(sides):
            records = make_records(args, llm, vocab_size, 2 * number + offset)
            if side == "generate":
                found = generate_pass(llm, records)
            else:
                found = batch_pass(llm, args, records, folder)
            sides[side].append(found)
            sys.stderr.write(
                f"{side:>9}: {found.completion_tokens:,} tokens in {found.seconds:.2f} s, "
                f"{found.tokens_per_s:,.0f} tok/s, {found.cached_tokens:,} prompt tokens cached\n"
            )
    return sides


def report(args: argparse.Namespace, llm: LLM, sides: dict[str, list[Pass]]) -> None:
    pairs = zip(sides["batch"], sides["generate"], strict=True)
    ratio = statistics.median(batch.tokens_per_s / plain.tokens_per_s for batch, plain in pairs)
    sys.stderr.write(
        f"batch reaches {100 * ratio:.1f} % of LLM.generate (to reach: {TARGET:.0%})\n"
    )
    write_row(
        "batch_throughput",
        metrics={
            "batch_over_generate": round(ratio, 4),
            "target": TARGET,
            "tokens_per_s": {
                side: [round(p.tokens_per_s, 1) for p in sides[side]] for side in sides
            },
            "seconds": {side: [round(p.seconds, 3) for p in sides[side]] for side in sides},
            "cpu_us_per_record": {
                side: [round(p.cpu_s / args.records * 1e6) for p in sides[side]] for side in sides
            },
            "completion_tokens": sides["batch"][0].completion_tokens,
            "cached_tokens": {side: [p.cached_tokens for p in sides[side]] for side in sides},
            "dry_run_estimate_s": round(sides["batch"][0].estimate_s or 0, 3),
            "eta_error_at": sides["batch"][0].eta_errors(),
        },
        config={
            "model": Path(args.model).name,
            "weights": "random" if args.model in SHAPES else "as stored",
            "dtype": llm.startup.dtype,
            "weights_dtype": llm.startup.weights_dtype,
            "device": llm.startup.device,
            "kv_cache_dtype": llm.startup.kv_cache_dtype,
            "attention_backend": llm.startup.attention_backend,
            "max_num_seqs": args.max_num_seqs,
            "records": args.records,
            "max_input": args.max_input,
            "max_output": args.max_output,
            "prefix": args.prefix,
            "groups": args.groups,
            "order": str(args.order),
            "window": args.window,
            "text_prompts": args.has_tokenizer,
            "simulated_step_ms": args.simulate,
            "seed": args.seed,
        },
        peer="LLM.generate",
    )


if __name__ == "__main__":
    main()
