"""Ids and bytes, compared with the tokenizers library and transformers on the same files."""

from __future__ import annotations

import json
import sys
import threading
import unicodedata
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nvcli.errors import RequestError, TemplateError, TokenizerError
from nvcli.text import Tokenizer, repair_surrogates
from nvcli.text.tokenizer import LONG_TEXT
from tests.text.tiny_tokenizer import ADDED_TOKENS, SPECIAL_TOKENS, write_tokenizer
from tests.waiting import run_command, until

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = (
    "",
    "Hello, world's end",
    "世界 and é, e\u0301",
    "👩🏽‍🚀🏳️‍🌈",
    "  \n\n\t x\r\n",
    "<|im_start|>user\nhi<think>",
)


def texts() -> st.SearchStrategy[str]:
    pieces = st.one_of(st.text(max_size=6), st.sampled_from(ADDED_TOKENS))
    return st.lists(pieces, max_size=5).map("".join)


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_as_the_library_does(any_folder: Path, any_tokenizer: Tokenizer, text: str) -> None:
    oracle = tokenizers.Tokenizer.from_file(str(any_folder / "tokenizer.json"))
    assert any_tokenizer.encode(text) == oracle.encode(text, add_special_tokens=False).ids


@given(pieces=st.lists(texts(), min_size=1, max_size=4), parse_special=st.booleans())
def test_a_long_text_has_the_ids_of_a_short_one(
    tokenizer: Tokenizer, pieces: list[str], parse_special: bool
) -> None:
    """They go two ways through the library."""
    text = "".join(pieces)
    text *= 1 + LONG_TEXT // max(1, len(text))
    is_long, backend = len(text) >= LONG_TEXT, tokenizer._backend
    if not parse_special:
        backend = tokenizer._plain_backend
    oracle = backend.encode(repair_surrogates(text), add_special_tokens=False).ids
    assert is_long == bool(text)
    assert tokenizer.encode(text, parse_special=parse_special) == oracle


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    count, is_over = 0, threading.Event()

    def run() -> None:
        nonlocal count
        while not is_over.is_set():
            count += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: count)
        before = count
        tokenizer.encode("word and " * 200_000)
        assert count - before > 1000
    finally:
        is_over.set()
        thread.join()


class PanicException(BaseException):
    """As the library's, which is no `Exception`."""


def test_a_panic_of_the_library_ends_one_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backend:
        error: BaseException = PanicException("Onig: Regex search error")

        def encode(self, text: str, **options: Any) -> Any:
            raise self.error

    backend = Backend()
    monkeypatch.setattr(tokenizer, "_backend", backend)
    with pytest.raises(RequestError, match="a text of 3 characters cannot be tokenized: Onig"):
        tokenizer.encode("   ")
    backend.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("   ")


@given(text=texts())
def test_decodes_what_it_encoded(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    # NFC is applied between added tokens, so compare normalised on both sides.
    assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize(
        "NFC", repair_surrogates(text)
    )


@given(data=st.data(), skip=st.booleans())
def test_decodes_any_ids_as_the_library_does(
    tiny_folder: Path, tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=20))
    oracle = tokenizers.Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    expected = oracle.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_bytes_of_every_id_are_the_bytes_of_the_text(any_tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        data = b"".join(any_tokenizer.token_bytes(i) for i in any_tokenizer.encode(text))
        assert data.decode() == text.replace("e\u0301", "é")


def test_single_bytes_are_raw_and_not_a_replacement_character(tokenizer: Tokenizer) -> None:
    assert sorted(tokenizer.token_bytes(i) for i in range(256)) == [bytes([b]) for b in range(256)]


def test_qwen3_every_id_has_bytes(qwen3_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(qwen3_folder)
    assert tokenizer.size == 151669
    everything = [tokenizer.token_bytes(i) for i in range(tokenizer.size)]
    assert all(everything)
    assert len(set(everything)) == tokenizer.size
    assert tokenizer.eos_token_ids == (151645,)


@pytest.mark.parametrize("token_id", [-1, 290, 299, 300, 2**31, 2**40])
def test_an_id_outside_is_an_error_of_the_request(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(RequestError, match=f"{token_id} is outside the tokenizer"):
        tokenizer.token_bytes(token_id)
    with pytest.raises(RequestError):
        tokenizer.decode([1, token_id])


def special_ids(tokenizer: Tokenizer) -> set[int]:
    return set(filter(tokenizer.is_special, range(tokenizer.size)))


def test_special_tokens_are_found_by_name(tokenizer: Tokenizer) -> None:
    assert tokenizer.size == 290
    assert [tokenizer.id_of(token) for token in ADDED_TOKENS] == list(range(264, 290))
    assert special_ids(tokenizer) == {tokenizer.id_of(token) for token in SPECIAL_TOKENS}
    assert tokenizer.think_id == tokenizer.id_of("<think>") == 288
    assert tokenizer.end_think_id == 289
    assert (tokenizer.tool_call_id, tokenizer.end_tool_call_id) == (278, 279)
    assert tokenizer.eos_token_ids == (tokenizer.id_of("<|im_end|>"),)
    assert tokenizer.id_of("<nothing>") is None
    assert not tokenizer.is_special(288)
    assert tokenizer.is_special(264)


def test_plain_text_makes_no_added_token(any_tokenizer: Tokenizer) -> None:
    text = "a<|im_end|><think>世\n\n"
    ids = any_tokenizer.encode(text, parse_special=False)
    assert not any(map(any_tokenizer.is_special, ids))
    assert any_tokenizer.think_id not in ids
    assert any_tokenizer.decode(ids) == text
    assert any_tokenizer.encode("a b\n\nc", parse_special=False) == any_tokenizer.encode("a b\n\nc")


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("\udcff\ud800\ud83d\ude00x", "\ufffd\ufffd😀x"),
        ("plain 世", "plain 世"),
    ],
)
def test_lone_surrogates_are_repaired(tokenizer: Tokenizer, text: str, repaired: str) -> None:
    assert repair_surrogates(text) == repaired
    assert tokenizer.decode(tokenizer.encode(text)) == repaired
    rendered = tokenizer.render([{"role": "user", "content": text}])
    assert repaired in rendered
    rendered.encode()


def test_heavy_modules_are_not_needed(tiny_folder: Path) -> None:
    script = f"""
import sys
import nvcli.text
loaded = [m for m in ("torch", "transformers", "tokenizers", "jinja2") if m in sys.modules]
assert not loaded, loaded
tokenizer = nvcli.text.Tokenizer.from_folder({str(tiny_folder)!r})
tokenizer.encode_chat([{{"role": "user", "content": "hi"}}])
loaded = [m for m in ("torch", "transformers") if m in sys.modules]
assert not loaded, loaded
"""
    result = run_command([sys.executable, "-c", script])
    assert result.returncode == 0, result.stderr


# --- folders -------------------------------------------------------------------------------------


def test_a_folder_without_tokenizer_json_goes_through_transformers(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = write_tokenizer(tmp_path, slow_format=True)
    assert not (folder / "tokenizer.json").exists()
    slow = Tokenizer.from_folder(folder)
    assert slow.size == tokenizer.size
    assert special_ids(slow) == special_ids(tokenizer)
    assert slow.eos_token_ids == tokenizer.eos_token_ids
    for text in TEXTS:
        assert slow.encode(text) == tokenizer.encode(text)
    for token_id in range(slow.size):
        assert slow.token_bytes(token_id) == tokenizer.token_bytes(token_id)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    assert slow.encode_chat(messages) == tokenizer.encode_chat(messages)


def test_a_missing_folder_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nowhere is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert caught.value.hint is not None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\x00\x01"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_one_line(tmp_path: Path, name: str, content: str) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / name).write_text(content)
    if name == "tokenizer_config.json" and content.startswith('{"'):
        Tokenizer.from_folder(folder)  # valid, though it says nothing
        return
    with pytest.raises(TokenizerError, match=name) as caught:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["decoder"] = {"type": "Fuse"}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerError, match="not byte-level BPE"):
        Tokenizer.from_folder(folder)


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_tokenizer(tmp_path)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"] = document["added_tokens"][:-2]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    loaded = Tokenizer.from_folder(folder)
    assert loaded.size == tokenizer.size
    assert loaded.encode("a</think>") == tokenizer.encode("a</think>")
    assert not loaded.is_special(289)


@pytest.mark.parametrize("key", ["400", "x"])
def test_an_added_token_that_does_not_fit_is_an_error(tmp_path: Path, key: str) -> None:
    folder = write_tokenizer(tmp_path)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"][key] = {"content": "<new>", "special": True}
    path.write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


def test_truncation_in_the_file_is_ignored(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    assert len(Tokenizer.from_folder(folder).encode("0123456789")) == 10


# --- where the template is -----------------------------------------------------------------------

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def test_template_files_and_their_order(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, chat_template=None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Tokenizer.from_folder(folder).render(USER) == "from json"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    listed = Tokenizer.from_folder(folder)
    assert listed.render(USER) == "plain"
    assert listed.render(USER, tools=[{"type": "function"}]) == "with tools"
    (folder / "chat_template.jinja").write_text("{{ eos_token }} from jinja")
    assert Tokenizer.from_folder(folder).render(USER) == "<|im_end|> from jinja"


def test_without_a_template_the_hint_names_raw(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match="--raw"):
        tokenizer.encode_chat(USER)
    assert tokenizer.encode("hi")
