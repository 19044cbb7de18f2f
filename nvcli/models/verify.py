"""What a model folder holds, read without loading it: tensors, sizes, and what is damaged."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.errors import NvcliError
from nvcli.models.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_INDEX = "model.safetensors.index.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_MAX_HEADER = 100_000_000
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16,
         "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a folder, counted; scales of quantised weights are no parameters."""

    num_parameters: int
    num_fp8: int  # of them
    num_bytes: int
    files: tuple[str, ...]


class DamagedFileError(ValueError):
    """A file that is not what it should be; the text says how."""


def read_weights(folder: Path) -> Weights:
    """Raises `DamagedFileError` for the first file that cannot be read."""
    count, fp8, size = 0, 0, 0
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        for name, entry in read_header(file).items():
            elements = math.prod(entry["shape"])
            count += 0 if name.endswith("_scale_inv") else elements
            fp8 += elements if entry["dtype"].startswith("F8_") else 0
            size += elements * _BITS.get(entry["dtype"], 8) // 8
    return Weights(count, fp8, size, tuple(f.name for f in files))


def read_header(file: Path) -> dict[str, Any]:
    """Name -> {dtype, shape, data_offsets} of a safetensors file, with its length checked."""
    try:
        with file.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            if length > _MAX_HEADER:
                raise DamagedFileError("its header is too long")
            header = json.loads(source.read(length))
        size = file.stat().st_size
    except OSError as exc:
        raise DamagedFileError(f"it cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise DamagedFileError("its header cannot be read; the file is cut or damaged") from exc
    header.pop("__metadata__", None)
    try:
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        _ = [(math.prod(entry["shape"]), entry["dtype"]) for entry in header.values()]
    except (TypeError, KeyError, IndexError, AttributeError) as exc:
        raise DamagedFileError("its header cannot be read; the file is damaged") from exc
    if 8 + length + end != size:
        raise DamagedFileError(f"it has {size:,} bytes, its header tells of {8 + length + end:,}")
    return dict(header)


def verify(folder: Path, *, progress: Callable[[str], None]) -> Iterator[tuple[str, str | None]]:
    """(what was checked, what is wrong with it or None), file by file.

    Files of the Hugging Face cache are named by their hash, which is computed again.
    """
    try:
        ModelConfig.from_hf(folder)
        yield "config.json", None
    except NvcliError as exc:
        yield "config.json", str(exc)
    yield "tokenizer", _tokenizer_problem(folder)
    tensors: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        progress(file.name)
        try:
            tensors.update(dict.fromkeys(read_header(file), file.name))
            yield file.name, hash_problem(file)
        except DamagedFileError as exc:
            yield file.name, str(exc)
    if (folder / _INDEX).is_file():
        yield _INDEX, _index_problem(folder, tensors)
    elif not list(folder.glob("*.safetensors")):
        yield "weights", "there is no safetensors file"
    for file in sorted(folder.glob("*.json")):
        if file.is_symlink():
            yield file.name, hash_problem(file)


def _tokenizer_problem(folder: Path) -> str | None:
    from nvcli.text import Tokenizer

    try:
        Tokenizer.from_folder(folder).check_templates()
    except NvcliError as exc:
        return str(exc)
    return None


def _index_problem(folder: Path, tensors: dict[str, str]) -> str | None:
    try:
        index = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        wrong = [name for name, file in index.items() if tensors.get(name) != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "it cannot be read"
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"{index[wrong[0]]} has no {wrong[0]}{more}"
    return None


def hash_problem(file: Path) -> str | None:
    """Compares the content with the hash that the cache named it by; None for plain files."""
    if not file.is_symlink():
        return None
    name = file.resolve().name
    if _SHA256.fullmatch(name):
        digest = hashlib.sha256()
    elif _SHA1.fullmatch(name):  # as git names a blob
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(f"blob {file.stat().st_size}\0".encode())
    else:
        return None
    with file.open("rb") as source:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
    return None if digest.hexdigest() == name else "its content does not match its hash"
