"""A checkpoint's tokenizer: strings to ids and back, and conversations to prompts.

Ids and bytes come from the `tokenizers` library, prompts from the checkpoint's own chat template.
Special ids are found by name, never by number.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvcli.errors import ModelError, RequestError, TemplateError, TokenizerError
from nvcli.text.messages import THINK_END, THINK_START, normalize_messages, parse_message
from nvcli.text.tokenizer_files import read_tokenizer_files
from nvcli.text.unicode import repair_surrogates
from nvcli.types import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import tokenizers

OWN_VARIABLES = frozenset(  # of a template, and what is none because `render` has the name
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # the blank shows whether a template trims
LONG_TEXT = 16 * 1024  # characters, from which on `encode` lets other threads run meanwhile


class _Found(dict[int, bytes]):
    """A cache of what `find` gives for an id; a dictionary, since every piece of text asks it."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._find(token_id)
        return data


class Tokenizer:
    """The tokenizer of one checkpoint folder. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._bytes = _Found(self._find_bytes)
        self._shown_bytes = _Found(lambda i: b"" if i in self._special else self._bytes[i])
        self.named_tokens = dict(named_tokens or {})  # "eos_token" -> "<|im_end|>"
        self.chat_templates = dict(chat_templates or {})  # "default" and others by name
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {token_id for token_id, token in added.items() if token.special}
        self.size = backend.get_vocab_size(with_added_tokens=True)
        # Ids found by name; None where the vocabulary has no such token.
        self.think_id, self.end_think_id = self.id_of(THINK_START), self.id_of(THINK_END)
        self.tool_call_id = self.id_of("<tool_call>")
        self.end_tool_call_id = self.id_of("</tool_call>")
        end = self.id_of(self.named_tokens.get("eos_token", ""))
        # The tokenizer's own; generation_config.json may name more.
        self.eos_token_ids: tuple[int, ...] = () if end is None else (end,)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Reads a checkpoint folder. Raises `TokenizerError` naming the file at fault."""
        backend, named_tokens, chat_templates = read_tokenizer_files(Path(path))
        return cls(backend, named_tokens=named_tokens, chat_templates=chat_templates)

    # --- text and ids -----------------------------------------------------------------------

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """The ids of `text`. Nothing is put before or after it.

        Names of added tokens in the text become those tokens, as in a rendered chat template;
        with `parse_special=False` they are text like any other. Lone surrogates become U+FFFD.
        Raises `RequestError` for what the pattern cannot cut, as many megabytes of blanks.
        """
        backend = self._backend if parse_special else self._plain_backend
        text = repair_surrogates(text)
        try:
            if len(text) < LONG_TEXT:
                encoding = backend.encode(text, add_special_tokens=False)
            else:  # only a batch lets other threads run meanwhile: a megabyte takes a second
                (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        except BaseException as exc:
            if type(exc).__name__ != "PanicException":  # Rust's, and no `Exception`
                raise
            reason = f"a text of {len(text):,} characters cannot be tokenized: {exc}"
            raise RequestError(reason, hint="Shorten it.") from exc
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids together. Raises `RequestError` for an id outside the tokenizer."""
        data = self.run_bytes(ids, skip_special_tokens=skip_special_tokens)
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one id; those of a piece of a character are no valid UTF-8.

        Raises `RequestError` for an id outside the tokenizer, which ends one request only.
        """
        return self._bytes[token_id]

    def run_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> bytes:
        """`token_bytes` of each, joined, but of special ids nothing where they are skipped."""
        found = self._shown_bytes if skip_special_tokens else self._bytes
        return b"".join(map(found.__getitem__, token_ids))

    def _find_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode("utf-8")
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            raise RequestError(
                f"token id {token_id} is outside the tokenizer, which has {self.size} tokens"
            )
        table = _byte_of_character()
        try:
            return bytes(table[character] for character in token)
        except KeyError:  # a token that was put into the vocabulary as plain text
            return token.encode("utf-8")

    def to_json(self) -> str:
        """The tokenizer.json of what was loaded."""
        text: str = self._backend.to_str()
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name, such as `<think>`; None where there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same model without its added tokens."""
        import tokenizers

        plain = tokenizers.Tokenizer(self._backend.model)
        plain.normalizer = self._backend.normalizer
        plain.pre_tokenizer = self._backend.pre_tokenizer
        return plain

    # --- conversations ----------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    def chat_template(self, *, with_tools: bool = False) -> str:
        """The template's source. Raises `TemplateError` where the checkpoint has none."""
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self.chat_templates:
                return self.chat_templates[name]
        raise TemplateError(
            "the checkpoint has no chat template", hint="Use --raw to send the text as it is"
        )

    def check_templates(self) -> None:
        """Raises `ModelError` for a template of the checkpoint that cannot be read."""
        for source in self.chat_templates.values():
            _check_own(source)

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text, equal to that of transformers' `apply_chat_template`.

        `continue_final_message` leaves the last message open for the model to go on with, and then
        no generation prompt is added. Other keywords reach the template as variables. Raises
        `TemplateError` for messages that the template or the model cannot take, and `ModelError`
        for a checkpoint whose template is none.
        """
        from nvcli.text.template import render_template

        reserved = OWN_VARIABLES.intersection(kwargs)
        if reserved:
            name = min(reserved)
            raise TemplateError(f"{name} cannot be set as a template variable", param=name)
        parsed = [
            message if isinstance(message, Message) else parse_message(message, f"messages[{i}]")
            for i, message in enumerate(messages)
        ]
        turns = normalize_messages(parsed, continue_final_message=continue_final_message)
        final_text: str = turns[-1]["content"]
        if continue_final_message:
            turns[-1]["content"] = final_text + _CONTINUE_TAG
        variables: dict[str, Any] = dict(self.named_tokens)
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        variables |= {
            "documents": None,
            **kwargs,
            "messages": turns,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        source = chat_template or self.chat_template(with_tools=bool(tools))
        if not chat_template:
            _check_own(source)
        text = render_template(source, variables)
        if continue_final_message:
            text = _cut_at_tag(text, final_text)
        return repair_surrogates(text)

    def encode_chat(
        self, messages: Sequence[Message | Mapping[str, Any]], /, **options: Any
    ) -> list[int]:
        """The prompt's ids; the options are those of `render`."""
        return self.encode(self.render(messages, **options))


def _check_own(source: str) -> None:
    from nvcli.text.template import check_template

    try:
        check_template(source)
    except TemplateError as exc:
        raise ModelError(
            f"the checkpoint's {exc.message}", hint="Copy or fetch it again; --raw needs none."
        ) from exc


def _cut_at_tag(text: str, final_text: str) -> str:
    """What stands before the tag that marks the end of the final message."""
    place = text.rfind(_CONTINUE_TAG.strip())
    if place < 0 or final_text.strip() not in text:
        raise TemplateError(
            "the chat template does not keep the last message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    is_kept = text.startswith(_CONTINUE_TAG, place)
    return text[:place] if is_kept else text[:place].rstrip()


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level vocabularies: printable Latin-1 bytes stand for themselves, the
    others are shifted, in order, to the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def load_tokenizer(folder: str | Path, *, is_optional: bool) -> Tokenizer | None:
    """None where the folder has none and that is allowed. Raises `TokenizerError`."""
    try:
        return Tokenizer.from_folder(folder)
    except TokenizerError:
        if is_optional:
            return None
        raise
