"""The engine's process over a scripted engine.

`config.model` is JSON: `answer`, `delay_s`, `error`, `gate`: a file that each grammar waits for,
`bug`: `submit` fails with each request, or `stats` from the first one on,
`failure`: what ends the engine once it is loaded; `warning`: is logged.
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from nvcli.config import EngineConfig
from nvcli.errors import EngineClosedError, ModelNotFoundError
from nvcli.server.engine_worker import main
from tests.server.scripted_llm import ScriptedLLM, make_tokenizer
from tests.waiting import until


def load(config: EngineConfig) -> ScriptedLLM:
    options = json.loads(config.model)
    if "warning" in options:
        logging.getLogger("nvcli").warning(options["warning"])
    if "error" in options:
        raise ModelNotFoundError(options["error"], hint="Look again.")
    folder = Path(tempfile.mkdtemp())
    tokenizer = make_tokenizer(folder)
    token_ids = tokenizer.encode(options["answer"])
    llm = ScriptedLLM(
        tokenizer, lambda _: token_ids, folder=folder, delay_s=options.get("delay_s", 0.0)
    )
    if "gate" in options:
        gate = Path(options["gate"])
        llm.compile_grammar = lambda spec: until(gate.exists) and None  # type: ignore
    if "bug" in options:
        add_bug(llm, options["bug"])
    if "failure" in options:
        llm._thread.fail(EngineClosedError(options["failure"], hint="Look again."))
    return llm


def add_bug(llm: ScriptedLLM, where: str) -> None:
    submit = llm.submit

    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug")

    def submit_once(request: Any, sink: Any) -> None:
        llm.stats = broken  # type: ignore[method-assign]
        submit(request, sink)

    llm.submit = broken if where == "submit" else submit_once  # type: ignore[method-assign]


if __name__ == "__main__":
    main(load)
