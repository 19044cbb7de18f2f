"""The process of one rank beside rank 0: `python -m nvcli.engine.tp_worker FD PARENT`.

It loads its share of the model, says `ready`, and then launches whatever plans the pipe brings; it
decides nothing and reads nothing back. It ends when the pipe does, or with its parent
(`be_child_of`), also while it waits for other ranks inside a collective.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from nvcli.engine.child import be_child_of
from nvcli.errors import EngineClosedError, NvcliError, first_line


def main() -> NoReturn:
    pipe = Connection(int(sys.argv[1]))
    be_child_of(int(sys.argv[2]))
    try:
        _work(pipe, pickle.loads(pipe.recv_bytes()))
    except EOFError:
        pass  # rank 0 is gone
    except Exception as error:  # noqa: BLE001 - rank 0 tells it, as the one error of all ranks
        _report(pipe, error)
    # Nothing is worth waiting for: a collective may never return, and the driver frees the memory.
    os._exit(0)


def _work(pipe: Connection, orders: dict[str, Any]) -> None:
    rank, size = orders["rank"], orders["size"]
    logging.getLogger("nvcli").setLevel(logging.CRITICAL)  # rank 0 says it all

    import torch

    from nvcli.engine.model_runner import ModelRunner
    from nvcli.engine.plan_record import PlanMirror
    from nvcli.parallel import TPGroup, find_store, prepare_environment

    prepare_environment()
    device = torch.device(orders["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pipe.send_bytes(pickle.dumps("started"))
    group = TPGroup.at(find_store(orders["port"], size), rank, size, device)
    group.greet(device)
    runner = ModelRunner(
        orders["folder"],
        orders["model_config"],
        orders["config"],
        vocab_size=orders["vocab_size"],
        group=group,
    )
    pipe.send_bytes(pickle.dumps("ready"))
    mirror = PlanMirror(runner.max_num_seqs)
    while record := pipe.recv_bytes():
        group.check()
        runner.launch(mirror.decode(record))


def _report(pipe: Connection, error: Exception) -> None:
    """Its kind, text, hint and parameter."""
    if isinstance(error, NvcliError):
        message = (type(error).__name__, error.message, error.hint, error.param)
    else:
        text = f"the engine stopped: {type(error).__name__}: {first_line(error)}"
        message = (EngineClosedError.__name__, text, None, None)
    try:
        pipe.send_bytes(pickle.dumps(message))
    except OSError:
        os._exit(1)


if __name__ == "__main__":
    main()
