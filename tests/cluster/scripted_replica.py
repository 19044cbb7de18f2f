"""An engine for replicas in tests: it says the prompt's token ids back, and dies of one of them."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvcli.config import EngineConfig
from nvcli.errors import WeightsError
from tests.server.scripted_llm import ScriptedLLM, make_tokenizer

POISON = 13


def load(config: EngineConfig) -> ScriptedLLM:
    """`config.model` is JSON: `delay_s` of a step, `error` of loading, and `deaths`: a folder with
    a file for each time that a replica may die, as it does after 25 answers. `weights` is a file
    with more of these, read anew with each loading, and `version`, an id before each answer;
    `gate` is a file that loading waits for; `template` is added to the tokenizer's. Once there is
    a file `confused`, it goes, and statistics are errors from then on."""
    options = json.loads(config.model)
    if "weights" in options:
        options |= json.loads(Path(options["weights"]).read_text())
    while "gate" in options and not Path(options["gate"]).exists():
        time.sleep(0.02)
    if "error" in options:
        raise WeightsError(options["error"], hint="Find another.")
    if options.get("dies"):
        os._exit(1)
    folder = Path(tempfile.mkdtemp())
    count = [0]
    before = [options["version"]] if "version" in options else []

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
        return [*before, *prompt[-4:]]

    tokenizer = make_tokenizer(folder)
    tokenizer.chat_templates["default"] += options.get("template", "")
    llm = ScriptedLLM(
        tokenizer,
        script,
        folder=folder,
        delay_s=options.get("delay_s", 0.0),
        max_num_seqs=4,
        num_blocks=200,
    )
    if "confused" in options:
        _confuse(llm, Path(options["confused"]))
    return llm


def _confuse(llm: ScriptedLLM, file: Path) -> None:
    stats = llm.stats

    def broken() -> Any:
        raise RuntimeError("no statistics")

    def found() -> Any:
        if file.exists():
            file.unlink()
            llm.stats = broken  # type: ignore[method-assign]
        return llm.stats() if llm.stats is broken else stats()

    llm.stats = found  # type: ignore[method-assign]
