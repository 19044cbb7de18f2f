"""Trains the tokenizer: byte-level BPE with Qwen3's pre-tokenizer, NFC and added tokens.

    python -m nvdemo.tokenizer --qwen3 FOLDER --out ../nvcli/demo

FOLDER holds Qwen3's tokenizer_config.json, from which chat template and added tokens are taken.
The words come from the generator and, for what users type freely, from the docstrings of
Python's standard library, which are read for their word counts alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.trainers import BpeTrainer

from nvdemo.lexicon.words import PIECES
from nvdemo.mix import conversation

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 4096
CONTEXT = 2048
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def docstrings(limit: int) -> Iterator[str]:
    """About ``limit`` characters of the standard library's docstrings."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if text.isascii():
                    limit -= len(text)
                    yield text
        if limit < 0:
            return


def corpus(samples: int) -> Iterator[str]:
    """Prompts and answers without the template's own text, then the docstrings."""
    for index in range(samples):
        sample = conversation(0, index)
        for message in sample.messages:
            yield message["content"]
        yield sample.thought
        yield sample.answer
        if sample.tools:
            yield json.dumps(sample.tools, ensure_ascii=False)
    yield from docstrings(5_000_000)


def train(samples: int, added: dict[str, dict[str, object]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = ByteLevelProcessor(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=12,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(samples), trainer)
    for entry in added.values():
        token = AddedToken(str(entry["content"]), normalized=False, special=bool(entry["special"]))
        if entry["special"]:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return tokenizer


def write(
    tokenizer: Tokenizer, config: dict[str, object], added: list[dict[str, object]], out: Path
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    entries = {str(tokenizer.token_to_id(str(entry["content"]))): entry for entry in added}
    written = {**config, "added_tokens_decoder": entries, "model_max_length": CONTEXT}
    text = json.dumps(written, ensure_ascii=False, indent=2)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def write_pieces(tokenizer: Tokenizer, path: Path) -> None:
    """The vocabulary's words, for the generator: a token that is never copied in training cannot
    be copied later."""
    words = {token.removeprefix("Ġ") for token in tokenizer.get_vocab()}
    kept = sorted(word for word in words if word.isascii() and word.isalpha() and len(word) > 1)
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--qwen3", type=Path, required=True, help="folder with Qwen3's tokenizer_config.json"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=20_000)
    args = parser.parse_args()
    config = json.loads((args.qwen3 / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = config["added_tokens_decoder"]
    tokenizer = train(args.samples, added)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(
            f"the vocabulary has {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}"
        )
    write(tokenizer, config, list(added.values()), args.out)
    write_pieces(tokenizer, PIECES)


if __name__ == "__main__":
    main()
