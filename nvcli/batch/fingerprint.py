"""What must not change between a run and its resumption: the model, the template, the parameters.

`OUT.meta.json` holds it beside the output, with the run's seed, so that a resumed run draws the
same numbers even where no `--seed` was given.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Self

from nvcli.batch.sink import OutputError
from nvcli.errors import UsageError
from nvcli.paths import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from nvcli.batch.options import BatchOptions
    from nvcli.config import EngineConfig

VERSION = 1
_HASHED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def model_digest(folder: Path) -> str:
    """A hash of a checkpoint: its small files, and the names and sizes of its weights."""
    state = sha256()
    for name in _HASHED_FILES:
        file = folder / name
        data = file.read_bytes() if file.is_file() else b""
        state.update(f"{name} {len(data)}\n".encode() + data)
    for file in sorted(folder.glob("*.safetensors")):
        state.update(f"{file.name} {file.stat().st_size}\n".encode())
    return state.hexdigest()[:32]


def fingerprint(options: BatchOptions, config: EngineConfig, model: Path | str) -> dict[str, Any]:
    """Everything that decides the text of a record, but the seed and the record itself. `model` is
    its folder, or what a server calls it."""
    return {
        "model": model if isinstance(model, str) else model_digest(model),
        "load_format": config.load_format,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": config.max_model_len,
        "sampling": {k: _plain(v) for k, v in sorted(options.sampling.items())},
        "response_format": options.response_format,
        "think": options.think,
        "system": options.system,
        "raw": options.is_raw,
        "prompt_field": options.prompt_field,
        "on_duplicate": str(options.on_duplicate),
        "output_format": str(options.output_format),
        "include_thinking": options.include_thinking,
        "echo": list(options.echo),
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def draw_seed() -> int:
    return secrets.randbits(53)  # readable by every JSON reader


def meta_path(output: Path) -> Path:
    return output.with_name(output.name + ".meta.json")


@dataclass(frozen=True, slots=True)
class RunMeta:
    """The content of `OUT.meta.json`."""

    seed: int
    fingerprint: dict[str, Any]

    @classmethod
    def read(cls, output: Path) -> Self | None:
        """None where there is none. Raises `UsageError` for a file that is not ours."""
        path = meta_path(output)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        try:
            value = json.loads(data)
            if value["version"] != VERSION:
                raise UsageError(f"{path} is of version {value['version']}, this nvcli knows 1")
            return cls(int(value["seed"]), dict(value["fingerprint"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} is no run description", hint="--force-resume goes on without it."
            ) from error

    def write(self, output: Path) -> None:
        """Atomically: a reader sees the old file or the new one. Raises `OutputError`."""
        path = meta_path(output)
        value = {"version": VERSION, "seed": self.seed, "fingerprint": self.fingerprint}
        try:
            write_whole(path, json.dumps(value, indent=1).encode() + b"\n", is_synced=True)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error

    def check_resumes(self, now: dict[str, Any], seed: int | None) -> None:
        """Raises `UsageError` naming what differs from the run that is resumed."""
        changed = [k for k in now if now[k] != self.fingerprint.get(k)]
        if seed is not None and seed != self.seed:
            changed.append("seed")
        if changed:
            raise UsageError(
                f"this is not the run that wrote the output: {', '.join(changed)} changed",
                hint="Use the same options, or --force-resume.",
            )
