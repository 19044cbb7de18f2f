"""Runs the server over a scripted engine as a process: `python -m tests.server.run_scripted JSON`.

Keys: the fields of `ServerConfig`, and `answer`, `delay_s`, `load_s`, `load_error`,
`is_remote`: the engine has a process of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nvcli.config import EngineConfig
from nvcli.errors import ModelError, NvcliError
from nvcli.server.config import ServerConfig
from nvcli.server.remote_engine import RemoteEngine
from nvcli.server.run import serve
from tests.server.scripted_llm import ScriptedLLM, make_tokenizer


def main() -> int:
    options: dict[str, Any] = json.loads(sys.argv[1])
    answer = options.pop("answer", "Hello!")
    delay_s = options.pop("delay_s", 0.0)
    load_s = options.pop("load_s", 0.0)
    load_error = options.pop("load_error", None)
    is_remote = options.pop("is_remote", False)
    for name in ("uds", "ready_file", "attach_socket"):
        if name in options:
            options[name] = Path(options[name])

    def load() -> ScriptedLLM | RemoteEngine:
        time.sleep(load_s)
        if is_remote:
            model = json.dumps({"answer": answer, "delay_s": delay_s})
            return RemoteEngine(EngineConfig(model=model), worker="tests.server.scripted_worker")
        if load_error is not None:
            raise ModelError(load_error)
        tokenizer = make_tokenizer(Path(tempfile.mkdtemp()))
        token_ids = tokenizer.encode(answer)
        return ScriptedLLM(tokenizer, lambda _: token_ids, delay_s=delay_s)

    def tell(text: str) -> None:
        print(text, flush=True)

    try:
        return serve(ServerConfig(port=0, **options), load, note=tell, warn=tell)
    except NvcliError as error:
        print(error, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
