"""The server under load: nvcli's own, in a process of its own, or any OpenAI endpoint."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.bench import calibrate
from nvcli.bench.engine_run import model_name

if TYPE_CHECKING:
    from nvcli.bench.calibrate import Calibration

ANY_VOCABULARY = 1000  # token ids that every vocabulary has


@dataclass(slots=True)
class Target:
    """The server under load."""

    url: str
    api_key: str | None = None
    model: str | None = None  # what requests name; None: the first that it serves
    vocab_size: int = ANY_VOCABULARY
    max_len: int | None = None
    calibration: Calibration | None = None  # of nvcli's own server
    is_own: bool = False
    engine: dict[str, Any] = field(default_factory=dict)  # options it was started with


def own_vocabulary(name: str) -> tuple[int, int]:
    """(token ids that may be used, longest context) of a model on this machine, without torch."""
    from nvcli.models.config import ModelConfig
    from nvcli.models.resolve import resolve_model
    from nvcli.text import Tokenizer

    folder = resolve_model(name)
    config = ModelConfig.from_hf(folder)
    size = config.vocab_size
    with contextlib.suppress(Exception):  # random weights need no tokenizer
        size = min(size, Tokenizer.from_folder(folder).size)
    return size, config.max_model_len


def own_target(url: str, name: str, max_len: int | None) -> Target:
    vocab_size, longest = own_vocabulary(name)
    found = calibrate.find(model_name(name))
    served = found.max_model_len if found is not None else None
    return Target(
        url,
        api_key=os.environ.get("NVCLI_API_KEY"),
        vocab_size=vocab_size,
        max_len=min(v for v in (max_len, longest, served) if v is not None),
        calibration=found,
        is_own=True,
    )


def server_flags(fields: dict[str, Any]) -> list[str]:
    """The engine's options as `nvcli serve` takes them."""
    names = {"memory_utilization": "gpu-memory-utilization"}
    flags = []
    for name, value in fields.items():
        if value is not None:
            flag = f"--{names.get(name, name).replace('_', '-')}"
            flags += [flag] if value is True else [flag, str(value)]
    return flags
