"""Puts a trained run where it belongs: the model into the package, draft and results beside the code.

    python -m nvdemo.export --run RUN --results RESULTS --package ../nvcli/demo

RUN is an OUT of training, RESULTS one of the evaluation. The tokenizer is in the package already.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from nvdemo.weights import special_ids

_HERE = Path(__file__).parents[1]
_LIMITS = {"package": 16_000_000, "draft": 3_000_000}
_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The demo model of nvcli

A Qwen3 of 7 million parameters, trained from nothing on the text of the project's own generator. It ships
in the package, so that `nvcli chat` opens a chat at once, without a GPU and without a network. It is a demo, a
smoke test and a numerical regression test: nearly every answer of it can be checked.

| | |
|---|---|
| architecture | Qwen3ForCausalLM, 6 layers, hidden 256, 4 heads, 2 KV heads, head_dim 128, FFN 768, tied |
| parameters | 6,951,680, in bf16 |
| vocabulary | 4,096: byte-level BPE, with Qwen3's pre-tokenizer and added tokens |
| context | 2,048 tokens |
| chat template | Qwen3's: thinking on and off, tools |
| trained on | {tokens} tokens of generated conversations, loss on the assistant's last turn |

## What it can do

Greetings, simple facts, counting, sorting, spelling, sums with a worked thought, JSON, exact copying, tool calls
with their results, recall over turns and in a long text, questions about nvcli, short stories. What it does not
know it says, and names a real model: `nvcli chat -m Qwen/Qwen3-0.6B`. It speaks English only, and knows nothing of
the world beyond capitals and the like. Do not rely on it for anything.

## Accuracy

Greedy answers to fresh questions, thinking on and off by turns unless the row says which. Names, tool names, keys and strings
are such as training never drew. "Bar" is what the project asks for.

{table}
The draft is a model of one million parameters with the same vocabulary, kept in `demo-model/draft`; its rows count the
tokens of the main model's greedy answers that it would have chosen too.

## How it was made

`demo-model/README.md` in the repository has the commands that make the text, train, evaluate and export. The chat
template and the pre-tokenizer's pattern are Qwen3's, by the Qwen team, under the Apache License 2.0; the weights and
the vocabulary are the project's own. Licence: Apache-2.0, see LICENSE.
"""


def generation_config(eos: int, pad: int) -> dict[str, object]:
    """A tiny model copies and counts best when it samples close to greedy."""
    return {
        "bos_token_id": pad,
        "eos_token_id": [eos, pad],
        "pad_token_id": pad,
        "do_sample": True,
        "temperature": 0.3,
        "top_k": 20,
        "top_p": 0.9,
    }


def trained_tokens(results: Path) -> int:
    """Over all runs that led to the weights, from their loss curves."""
    return sum(int(path.read_text(encoding="utf-8").splitlines()[-1].split(",")[2])
               for path in results.glob("loss*.csv"))


def export(run: Path, results: Path, package: Path) -> None:
    kept = _HERE / "results"
    kept.mkdir(exist_ok=True)
    for name in ("accuracy.md", "accuracy.json", "examples.jsonl"):
        shutil.copyfile(results / name, kept / name)
    for name in ("model.safetensors", "config.json"):
        shutil.copyfile(run / "main" / name, package / name)
        (_HERE / "draft").mkdir(exist_ok=True)
        shutil.copyfile(run / "draft" / name, _HERE / "draft" / name)
    shutil.copyfile(_HERE.parent / "LICENSE", package / "LICENSE")
    ids = special_ids(Tokenizer.from_file(str(package / "tokenizer.json")))
    text = json.dumps(generation_config(*ids), indent=2)
    (package / "generation_config.json").write_text(text + "\n", encoding="utf-8")
    card = _CARD.format(
        table=(kept / "accuracy.md").read_text(encoding="utf-8"), tokens=f"{trained_tokens(kept):,}")
    (package / "README.md").write_text(card, encoding="utf-8")
    for folder, limit in ((package, _LIMITS["package"]), (_HERE / "draft", _LIMITS["draft"])):
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{folder.name}: {size:,} bytes")
        if size > limit:
            raise SystemExit(f"{folder} is larger than {limit:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="an OUT of training")
    parser.add_argument("--results", type=Path, required=True, help="an OUT of the evaluation")
    parser.add_argument("--package", type=Path, required=True, help="the package's demo folder")
    args = parser.parse_args()
    export(args.run, args.results, args.package)


if __name__ == "__main__":
    main()
