"""The text is the same for the same seed and index, and the held-out values stay held out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from nvdemo.dice import Dice, held_out
from nvdemo.evaluate import SUITES, right, samples_of
from nvdemo.mix import MIX, conversation, not_told, plain, recall
from nvdemo.tasks import copying, stories, tools, unknown
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


def test_recall_asks_for_what_was_told_last() -> None:
    corrections = 0
    for index in range(400):
        later = index % 2 == 0
        sample = conversation(21, index, partial(recall, later=later))
        said = [m["content"] for m in sample.messages if m["role"] != "system"]
        for value in sample.expected.split("|"):
            assert value in " ".join(said[::2])  # the user said it
            assert not (later and f"Nice to meet you, {value}!" in said[1])
        names = [text for text in said[1::2] if "Nice to meet you, " in text]
        corrections += len(names) > 1
        if sample.kind == "name_recall" and names:
            name = sample.expected.split("|")[0]
            assert f"Nice to meet you, {name}!" in names[-1]
    assert corrections > 10


def test_nothing_is_told_beside_the_facts() -> None:
    dice = Dice(7)
    for _ in range(1000):
        _, reply = plain(dice)
        assert not reply.startswith("Nice to meet you")
        assert not reply.endswith("I will remember that.")
    for index in range(200):
        sample = conversation(22, index, partial(not_told, after=0.0))
        assert "I will remember" not in str(sample.messages)


def test_invented_countries_are_not_real() -> None:
    assert all(map(unknown.is_real, ["France", "the Gambia", "Gambia", "Frnace", "turkey"]))
    assert not any(map(unknown.is_real, ["Blorbia", "Atlantis", "Narnia", "Wakanda"]))
    dice = Dice(5)
    names = {unknown.invented_country(dice) for _ in range(600)}
    assert len(names) > 400
    assert not any(map(unknown.is_real, names))


def test_every_story_has_a_plot_and_heroes_differ() -> None:
    told = [conversation(23, index, stories.story) for index in range(300)]
    plots = {stories.plot_of(sample.answer) for sample in told}
    assert plots == set(range(12))


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
