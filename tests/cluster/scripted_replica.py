"""An engine for replicas in tests: it says the prompt's token ids back, and dies of one of them."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nvcli.config import EngineConfig
from nvcli.errors import WeightsError
from tests.server.scripted_llm import ScriptedLLM, make_tokenizer

POISON = 13


def load(config: EngineConfig) -> ScriptedLLM:
    """`config.model` is JSON: `delay_s` of a step, `error` of loading, and `deaths`: a folder with
    a file for each time that a replica may die, as it does after 25 answers."""
    options = json.loads(config.model)
    if "error" in options:
        raise WeightsError(options["error"], hint="Find another.")
    folder = Path(tempfile.mkdtemp())
    count = [0]

    def script(prompt: tuple[int, ...]) -> Sequence[int]:
        if POISON in prompt:
            time.sleep(0.05)
            os._exit(1)
        count[0] += 1
        if count[0] == 25 and "deaths" in options:
            for file in Path(options["deaths"]).iterdir():
                with suppress(FileNotFoundError):  # another one dies of it
                    file.unlink()
                    os._exit(1)
        return prompt[-4:]

    return ScriptedLLM(
        make_tokenizer(folder),
        script,
        folder=folder,
        delay_s=options.get("delay_s", 0.0),
        max_num_seqs=4,
        num_blocks=200,
    )
