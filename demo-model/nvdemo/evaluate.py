"""Asks fresh questions of every kind, greedily, and writes a table of what was right.

python -m nvdemo.evaluate --model ../nvcli/demo --draft draft --out results
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from nvdemo import weights
from nvdemo.decode import agreement, greedy
from nvdemo.suites import SUITES, samples_of
from nvdemo.tasks import stories

if TYPE_CHECKING:
    from nvdemo.chat import Sample
    from nvdemo.model import Qwen3


def visible(text: str) -> str:
    """The answer after the thought."""
    return text.rsplit("</think>", 1)[-1].strip("\n")


def parse_calls(text: str) -> list[dict[str, Any]] | None:
    try:
        return [
            json.loads(body)
            for body in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
        ]
    except ValueError:
        return None


def right(sample: Sample, text: str) -> bool:
    answer = visible(text)
    if sample.check == "starts":
        return text.startswith(sample.answer)
    if sample.thinking and "</think>" not in text:
        return False
    if sample.check == "calls":
        return parse_calls(answer) == sample.calls
    if sample.check == "json":
        try:
            return bool(json.loads(answer) == json.loads(sample.answer))
        except ValueError:
            return False
    if sample.check == "contains":
        return all(part.lower() in answer.lower() for part in sample.expected.split("|"))
    if sample.check == "story":
        return good_story(sample, answer)
    return answer == sample.answer


def good_story(sample: Sample, text: str) -> bool:
    """Whole sentences, none twice, at least 60 words, and the hero that was asked for."""
    sentences = [s for s in re.split(r"(?<=[.!?])\"?\s+", text) if s]
    whole = text.endswith((".", "!", "?", '"')) and all(
        part[:1].isupper() for part in text.split("\n\n")
    )
    return (
        whole
        and len(text.split()) >= 60
        and len(set(sentences)) == len(sentences)
        and sample.expected.lower() in text.lower()
    )


def plots(stories_told: list[str]) -> dict[str, Any]:
    """How many of the stories do not have the plot that is told most often."""
    counts = Counter(stories.plot_of(text) for text in stories_told)
    most = max(counts.values(), default=0)
    return {
        "name": "stories: another plot than the most frequent one",
        "right": len(stories_told) - most,
        "of": len(stories_told),
        "bar": 0.0,
    }


def evaluate(
    model: Qwen3, draft: Qwen3, tokenizer: Tokenizer, count: int
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """A row for each suite, and the questions that went wrong with a few that went right."""
    stop, _ = weights.special_ids(tokenizer)
    asked = [(suite, sample) for suite in SUITES for sample in samples_of(suite, count)]
    prompts = [
        e.ids
        for e in tokenizer.encode_batch_fast(
            [s.prompt() for _, s in asked], add_special_tokens=False
        )
    ]
    long = [i for i, (_, s) in enumerate(asked) if s.kind == "story"]
    short = [i for i, (_, s) in enumerate(asked) if s.kind != "story"]
    answers: list[list[int]] = [[] for _ in asked]
    for part, limit in ((short, 480), (long, 900)):
        written = greedy(model, [prompts[i] for i in part], limit, stop)
        for i, ids in zip(part, written, strict=True):
            answers[i] = ids
    texts = tokenizer.decode_batch(answers, skip_special_tokens=False)
    hits: Counter[str] = Counter()
    examples: list[dict[str, str]] = []
    shown: Counter[tuple[str, bool]] = Counter()
    for (suite, sample), text in zip(asked, texts, strict=True):
        correct = right(sample, text)
        hits[suite.name] += correct
        shown[suite.name, correct] += 1
        if shown[suite.name, correct] <= (1 if correct else 6):
            examples.append(
                {
                    "suite": suite.name,
                    "right": str(correct),
                    "question": sample.messages[-1]["content"],
                    "want": sample.completion(),
                    "got": text,
                }
            )
    rows: list[dict[str, Any]] = [
        {"name": suite.name, "right": hits[suite.name], "of": count, "bar": suite.bar}
        for suite in SUITES
    ]
    rows.append(plots([texts[i] for i in long]))
    for name, part in (("draft agrees, stories", long), ("draft agrees, answers", short)):
        equal, total = agreement(draft, [prompts[i] for i in part], [answers[i] for i in part])
        rows.append({"name": name, "right": equal, "of": total, "bar": 0.60})
    return rows, examples


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| task | right | of | share | bar | |", "|---|--:|--:|--:|--:|---|"]
    for row in rows:
        share = row["right"] / max(1, row["of"])
        bar = f"{row['bar']:.0%}" if row["bar"] else ""
        verdict = "" if not row["bar"] else "met" if share >= row["bar"] else "missed"
        lines.append(
            f"| {row['name']} | {row['right']:,} | {row['of']:,} | {share:.1%} | {bar} | "
            f"{verdict} |"
        )
    return "\n".join(lines) + "\n"


def write(rows: list[dict[str, Any]], examples: list[dict[str, str]], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "accuracy.md").write_text(table(rows), encoding="utf-8")
    (out / "accuracy.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
    (out / "examples.jsonl").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with weights and tokenizer"
    )
    parser.add_argument("--draft", type=Path, required=True, help="folder with the draft's weights")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200, help="questions for each task")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model, draft = weights.load(args.model, device, dtype), weights.load(args.draft, device, dtype)
    rows, examples = evaluate(model, draft, tokenizer, args.count)
    write(rows, examples, args.out)
    print(table(rows))


if __name__ == "__main__":
    main()
