"""The server under load: nvcli's own, in a process of its own, or any OpenAI endpoint."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.bench import calibrate
from nvcli.bench.engine_run import model_name
from nvcli.config import MAX_NUM_SEQS

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
    """(token ids that may be used, longest context) of a model, without torch and weights."""
    from nvcli.models.config import ModelConfig
    from nvcli.models.resolve import some_files
    from nvcli.text import Tokenizer

    with some_files(name, "*.json", "merges.txt", "vocab.txt") as folder:
        config = ModelConfig.from_hf(folder)
        size = config.vocab_size
        with contextlib.suppress(Exception):  # random weights need no tokenizer
            size = min(size, Tokenizer.from_folder(folder).size)
    return size, config.max_model_len


def own_target(url: str, name: str, given: dict[str, Any]) -> Target:
    """nvcli's own server at `url`, started with the engine's options that were given."""
    vocab_size, longest = own_vocabulary(name)
    found = calibrate.find(model_name(name), given.get("tensor_parallel_size", 1), given)
    max_len = min(given.get("max_model_len") or longest, longest)
    if found is not None:
        found.slots = given.get("max_num_seqs") or MAX_NUM_SEQS["cuda" if found.depth else "cpu"]
    return Target(
        url,
        api_key=os.environ.get("NVCLI_API_KEY"),
        vocab_size=vocab_size,
        max_len=max_len,
        calibration=found,
        is_own=True,
        engine={k: v for k, v in given.items() if k != "model"},
    )


def server_flags(fields: dict[str, Any]) -> list[str]:
    """The engine's options as `nvcli serve` takes them."""
    flags = []
    for name, value in fields.items():
        if value is not None:
            flag = flag_of(name, value)
            flags += [flag] if isinstance(value, bool) else [flag, str(value)]
    return flags


def flag_of(name: str, value: Any) -> str:
    """How the command line spells a field of `EngineConfig`."""
    names = {"memory_utilization": "gpu-memory-utilization"}
    flag = names.get(name, name).replace("_", "-")
    return f"--no-{flag}" if value is False else f"--{flag}"
