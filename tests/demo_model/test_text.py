"""The text is the same for the same seed and index, and the held-out values stay held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nvdemo.dice import Dice, held_out
from nvdemo.evaluate import SUITES, right, samples_of
from nvdemo.mix import MIX, conversation
from nvdemo.tasks import copying, tools
from tokenizers import Tokenizer

DEMO = Path(__file__).parents[2] / "nvcli" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_same_index_same_text() -> None:
    first = [conversation(3, index).prompt() for index in range(200)]
    again = [conversation(3, index).prompt() for index in reversed(range(200))][::-1]
    assert first == again
    assert first != [conversation(4, index).prompt() for index in range(200)]


def test_made_up_values_are_disjoint() -> None:
    train, unseen = Dice(1), Dice(2)
    unseen.unseen = True
    digits = "0123456789"
    seen = {train.word() for _ in range(5000)} | {train.string(4, 6, digits) for _ in range(5000)}
    fresh = {unseen.word() for _ in range(500)} | {unseen.string(4, 6, digits) for _ in range(500)}
    assert not seen & fresh
    assert not any(map(held_out, seen))
    assert all(map(held_out, fresh))


def test_unseen_tools_are_made_of_held_out_words() -> None:
    trained = {
        tool["function"]["name"]
        for index in range(400)
        for tool in conversation(1, index, tools.tool_call).tools
    }
    for index in range(50):
        dice = Dice(index)
        dice.unseen = True
        assert tools.made_up(dice).name not in trained


def test_phrases_keep_their_fields() -> None:
    for index in range(300):
        sample = conversation(8, index, copying.echo)
        assert sample.answer in sample.messages[-1]["content"]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_the_generator_answers_its_own_questions(suite) -> None:
    for sample in samples_of(suite, 8):
        assert right(sample, sample.completion().removesuffix("<|im_end|>"))


def test_every_answer_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    for task, _ in MIX:
        text = conversation(9, 0, task).prompt() + conversation(9, 0, task).completion()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["", "naïve café", "日本語 🚀", "\x00\x1b[0m", "a\r\nb\tc  d", "١٢٣"]
)
def test_any_text_survives_the_tokenizer(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_follows_qwen3(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 4096
    assert [len(tokenizer.encode(digits).ids) for digits in ("7", "42", "2026")] == [1, 2, 4]
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids  # NFC
    config = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    for number, entry in config["added_tokens_decoder"].items():
        assert tokenizer.token_to_id(entry["content"]) == int(number)
    assert len(config["added_tokens_decoder"]) == 26
