"""Reading a checkpoint's tokenizer files.

The normal path is `tokenizer.json`, read by the `tokenizers` library alone. Only a folder without
that file (vocab.json and merges.txt) is handed to transformers, which builds the same object from
it. Names of special tokens and the chat template come from the files beside it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nvcli.errors import TokenizerError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import tokenizers

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def read_tokenizer_files(
    folder: Path,
) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]:
    """The tokenizer, its named tokens and its chat templates, as `Tokenizer` takes them. Raises
    `TokenizerError` naming the file at fault.
    """
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is not a folder")
    config = _read_object(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _load_backend(folder / "tokenizer.json")
    else:
        backend = _load_with_transformers(folder)
    _add_configured_tokens(backend, config)
    return backend, _find_named_tokens(folder, config), _find_templates(folder, config)


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is missing."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot read {path}: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"cannot read {path}: it holds no JSON object")
    return value


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"cannot read {path}: {first_line(error)}") from error
    backend.no_truncation()
    backend.no_padding()
    _check_byte_level(backend, path)
    return backend


def _load_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    if not any((folder / name).is_file() for name in ("vocab.json", "tokenizer.model")):
        raise TokenizerError(
            f"{folder} has no tokenizer.json",
            hint="A checkpoint needs tokenizer.json, or vocab.json with merges.txt",
        )
    import transformers

    try:
        slow = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise TokenizerError(
            f"cannot build a tokenizer from {folder}: {first_line(error)}"
        ) from error
    backend: tokenizers.Tokenizer | None = getattr(slow, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(f"the tokenizer in {folder} has no byte-level vocabulary")
    _check_byte_level(backend, folder)
    return backend


def _check_byte_level(backend: tokenizers.Tokenizer, path: Path) -> None:
    if type(backend.decoder).__name__ != "ByteLevel":
        raise TokenizerError(f"the tokenizer in {path} is not byte-level BPE, as Qwen3's is")


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds tokens that only tokenizer_config.json lists, as transformers does. Their ids follow
    those of the vocabulary, so a list that leaves a gap is an error and not a shift."""
    import tokenizers

    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for key, entry in sorted(listed.items(), key=lambda item: item[0].zfill(10)):
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isdecimal() or not isinstance(content, str):
            raise TokenizerError(f"tokenizer_config.json: added token {key!r:.40} is malformed")
        if backend.token_to_id(content) is not None:
            continue
        options = {
            name: bool(entry.get(name, False))
            for name in ("single_word", "lstrip", "rstrip", "normalized")
        }
        special = bool(entry.get("special", False))
        token = tokenizers.AddedToken(content, special=special, **options)
        if special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])
        if backend.token_to_id(content) != int(key):
            raise TokenizerError(
                f"tokenizer_config.json gives {content!r} the id {key}, which is not the next free"
            )


def _find_named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    sources = (config, _read_object(folder / "special_tokens_map.json"))
    named: dict[str, str] = {}
    for name in (f"{kind}_token" for kind in _NAMED_TOKENS):
        for source in sources:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                named[name] = value
                break
    return named


def _find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A file of its own wins over tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            templates = {"default": file.read_text("utf-8")}
            for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
                templates[other.stem] = other.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"cannot read {file}: {first_line(error)}") from error
        return templates
    for source in (config, _read_object(folder / "chat_template.json")):
        value = source.get("chat_template")
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            named = [item for item in value if isinstance(item, dict)]
            return {str(item.get("name")): str(item.get("template")) for item in named}
    return {}
