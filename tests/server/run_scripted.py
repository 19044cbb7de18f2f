"""Runs the server over a scripted engine as a process: `python -m tests.server.run_scripted JSON`.

Keys: the fields of `ServerConfig`, and `answer`, `delay_s`, `load_error`; `max_model_len`,
`num_blocks`: of the device; `is_remote`: the engine has a process of its own; `close_s`: for
connections after the drain; `load_gate`, `answer_gate`: a file that loading, that the first step
waits for.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from nvcli.config import EngineConfig
from nvcli.errors import ModelError, NvcliError
from nvcli.server import run
from nvcli.server.config import ServerConfig
from nvcli.server.remote_engine import RemoteEngine
from tests.server.scripted_llm import ScriptedLLM, make_tokenizer
from tests.waiting import until


def open_gate(llm: ScriptedLLM, file: Path) -> None:
    until(file.exists)
    llm.device.gate.set()


def main() -> int:
    options: dict[str, Any] = json.loads(sys.argv[1])
    answer = options.pop("answer", "Hello!")
    delay_s = options.pop("delay_s", 0.0)
    size = {key: options.pop(key) for key in ("max_model_len", "num_blocks") if key in options}
    load_gate = options.pop("load_gate", None)
    answer_gate = options.pop("answer_gate", None)
    load_error = options.pop("load_error", None)
    is_remote = options.pop("is_remote", False)
    run.CLOSE_TIMEOUT_S = options.pop("close_s", run.CLOSE_TIMEOUT_S)
    for name in ("uds", "ready_file", "attach_socket", "mcp_file"):
        if name in options:
            options[name] = Path(options[name])

    def load() -> ScriptedLLM | RemoteEngine:
        if load_gate is not None:
            until(Path(load_gate).exists)
        if is_remote:
            model = json.dumps({"answer": answer, "delay_s": delay_s})
            return RemoteEngine(EngineConfig(model=model), worker="tests.server.scripted_worker")
        if load_error is not None:
            raise ModelError(load_error)
        tokenizer = make_tokenizer(Path(tempfile.mkdtemp()))
        token_ids = tokenizer.encode(answer)
        llm = ScriptedLLM(tokenizer, lambda _: token_ids, delay_s=delay_s, **size)
        if answer_gate is not None:
            llm.device.gate.clear()
            threading.Thread(target=open_gate, args=(llm, Path(answer_gate)), daemon=True).start()
        return llm

    def tell(text: str) -> None:
        print(text, flush=True)

    try:
        return run.serve(ServerConfig(port=0, **options), load, note=tell, warn=tell)
    except NvcliError as error:
        print(error, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
