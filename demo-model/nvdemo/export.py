"""Puts a trained run where it belongs: the model into the package, the draft beside the code.

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
_CARD = _HERE / "card.md"


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
    return sum(
        int(path.read_text(encoding="utf-8").splitlines()[-1].split(",")[2])
        for path in results.glob("loss*.csv")
    )


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
    card = _CARD.read_text(encoding="utf-8").format(
        table=(kept / "accuracy.md").read_text(encoding="utf-8"), tokens=f"{trained_tokens(kept):,}"
    )
    (package / "README.md").write_text(card, encoding="utf-8")
    for folder, limit in ((package, _LIMITS["package"]), (_HERE / "draft", _LIMITS["draft"])):
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{folder.name}: {size:,} bytes")
        if size > limit:
            raise SystemExit(f"{folder} is larger than {limit:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="an OUT of training")
    parser.add_argument("--results", type=Path, required=True, help="an OUT of the evaluation")
    parser.add_argument("--package", type=Path, required=True, help="the package's demo folder")
    args = parser.parse_args()
    export(args.run, args.results, args.package)


if __name__ == "__main__":
    main()
