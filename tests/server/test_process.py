"""The engine in a process of its own: the same answers, and ends of either side."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.config import EngineConfig
from nvcli.engine.engine import Request
from nvcli.engine.grammar import GrammarSpec
from nvcli.errors import ModelNotFoundError
from nvcli.logs import configure_logging
from nvcli.server.bridge import merge_deltas
from nvcli.server.config import ServerConfig
from nvcli.server.remote_engine import RemoteEngine
from nvcli.server.wire import (
    FrameReader,
    encode,
    merge_packed,
    pack_output,
    read_frame,
    unpack_output,
)
from nvcli.types import FinishReason, RequestOutput, SamplingParams, ToolCall, Usage
from tests.server.conftest import DEFAULTS, Serve, Served
from tests.server.test_invariants import fold
from tests.waiting import PATIENCE_S, is_running, until

WORKER = "tests.server.scripted_worker"
ANSWER = "<think>\nhm\n</think>\n\nHi 世!"
CHAT = "/v1/chat/completions"


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[Any], list[int]]:
    values = draw(st.lists(st.text() | st.integers() | st.none(), max_size=6))
    return values, draw(st.lists(st.integers(0, 200), max_size=8))


@given(cuts())
def test_frames_come_out_of_pieces_of_any_size(case: tuple[list[Any], list[int]]) -> None:
    values, places = case
    data = b"".join(map(encode, values))
    reader = FrameReader()
    edges = sorted({0, len(data), *(place for place in places if place < len(data))})
    found: list[Any] = []
    for start, end in itertools.pairwise(edges):
        found += reader.feed(data[start:end])
    assert found == values


Start = Callable[..., Served]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[Served] = []

    def make(answer: str = ANSWER, **options: Any) -> Served:
        model = json.dumps({"answer": answer, **options})
        llm = RemoteEngine(EngineConfig(model=model), worker=WORKER)
        served = Served(llm, ServerConfig(served_model_names=("scripted",)))
        running.append(served)
        return served

    yield make
    for served in running:
        served.close()


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("id", "created")}


def test_the_same_answers_as_in_a_thread(start: Start, serve: Serve) -> None:
    remote, local = start(), serve(ANSWER)
    fields: dict[str, Any] = {"n": 2, "logprobs": True, "top_logprobs": 2, "seed": 1}
    assert without_ids(remote.chat(**fields)) == without_ids(local.chat(**fields))
    assert fold(remote.chat_stream(**fields), 2) == fold(local.chat_stream(**fields), 2)
    for path, body in (
        ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 2}),
        ("/v1/embeddings", {"input": "abc"}),
    ):
        body = {"model": "scripted", **body}
        assert without_ids(remote.post(path, body).json()) == without_ids(
            local.post(path, body).json()
        )
    wait_idle(remote)


def wait_idle(served: Served) -> None:
    def is_idle() -> bool:
        stats = served.llm.stats()
        num_open = stats.num_running + stats.num_waiting + served.app.state.bridge.num_open
        return num_open == 0 and bool(stats.num_free_blocks == stats.num_blocks)

    until(is_idle, f"the engine is idle: {served.llm.stats()}")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "context_length_exceeded"),
        ({"stop_token_ids": [300]}, "invalid_parameter"),
        ({"guided_regex": "("}, "invalid_grammar"),
    ],
)
def test_bad_requests_are_refused_at_once(start: Start, fields: Any, code: str) -> None:
    response = start().post(CHAT, {**DEFAULTS, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == code


def test_leaving_ends_the_request_over_there(start: Start) -> None:
    served = start("x" * 400, delay_s=0.2)
    with served.client.stream("POST", CHAT, json={**DEFAULTS, "stream": True}) as response:
        pieces = response.iter_raw()
        next(pieces)
    wait_idle(served)
    assert served.app.state.bridge.num_aborted == 1  # it did not run to its end


def test_it_logs_where_its_parent_does(start: Start, tmp_path: Path, capfd: Any) -> None:
    log = tmp_path / "log"
    for verbosity in (0, -1):
        configure_logging(verbosity, log)
        start(warning=f"odd weights {verbosity}")
    assert capfd.readouterr().err == "nvcli: odd weights 0\n"
    assert "WARNING nvcli: odd weights 0\n" in log.read_text()
    assert log.read_text().endswith("WARNING nvcli: odd weights -1\n")
    reader, writer = os.pipe()
    configure_logging(0, Path(f"/dev/fd/{writer}"))
    start()  # without what only its parent has
    configure_logging()
    os.close(reader)
    os.close(writer)


def wait_ended(sock: socket.socket, count: int) -> dict[str, FinishReason | None]:
    """The next requests that end, and why."""
    found: dict[str, FinishReason | None] = {}
    while len(found) < count:
        pieces, _, _ = read_frame(sock)
        for request_id, packed in pieces:
            output = unpack_output(request_id, packed)
            if output.is_finished:
                found[request_id] = output.finish_reason
    return found


def test_a_slow_grammar_holds_nobody_up(tmp_path: Path) -> None:
    """And an abort that comes meanwhile ends its request."""
    gate = tmp_path / "gate"
    config = EngineConfig(model=json.dumps({"answer": "x", "delay_s": 0.05, "gate": str(gate)}))
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", WORKER, str(theirs.fileno()), str(os.getpid())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        ours.settimeout(PATIENCE_S)
        ours.sendall(encode((config, None)))
        assert read_frame(ours)[0] == "loaded"

        def submit(request_id: str, spec: GrammarSpec | None, max_tokens: int) -> None:
            request = Request(
                request_id=request_id,
                prompt_token_ids=[5, 6, 7],
                params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            )
            ours.sendall(encode(("submit", (request, spec))))

        submit("slow", GrammarSpec("{}"), 400)
        submit("quick", None, 2)
        assert wait_ended(ours, 1) == {"quick": FinishReason.LENGTH}
        ours.sendall(encode(("abort", "slow")))
        submit("after", None, 2)
        assert wait_ended(ours, 1) == {"after": FinishReason.LENGTH}
        gate.touch()
        assert wait_ended(ours, 1) == {"slow": FinishReason.ABORT}
        ours.sendall(encode(None))
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}])
def test_a_bug_where_a_request_is_added_ends_that_request(start: Start, fields: Any) -> None:
    """One with a grammar is added in a thread that nobody listens to."""
    served = start(bug="submit")
    response = served.post(CHAT, {**DEFAULTS, **fields})
    assert response.status_code == 500
    assert "a bug" in response.json()["error"]["message"]
    assert served.client.get("/health").status_code == 200


def test_a_bug_where_outputs_are_sent_ends_the_process(start: Start) -> None:
    """Or every request would wait for ever."""
    served = start("x" * 400, bug="stats")
    response = served.post(CHAT, DEFAULTS)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_closed"
    assert served.client.get("/health").status_code == 503


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_of_the_whole_group_are_the_parents(start: Start, number: int) -> None:
    """Ctrl-C and a terminal that closes reach every process; the server still drains."""
    served = start()
    os.kill(served.llm.pid, number)
    assert served.chat()["choices"][0]["message"]["content"]
    assert served.llm.is_alive


def test_a_killed_engine_ends_requests_and_health(start: Start) -> None:
    served = start("x" * 400, delay_s=0.2)
    text = ""
    with served.client.stream("POST", CHAT, json={**DEFAULTS, "stream": True}) as response:
        for piece in response.iter_text():
            if not text:
                os.kill(served.llm.pid, signal.SIGKILL)
            text += piece
    assert '"code":"engine_closed"' in text
    assert "the engine stopped: its process was ended by SIGKILL" in text
    assert text.endswith("data: [DONE]\n\n")
    assert served.client.get("/health").status_code == 503
    assert served.post(CHAT, DEFAULTS).status_code == 503
    assert served.app.state.bridge.num_open == 0


def test_what_ended_the_engine_over_there_is_told_here(start: Start) -> None:
    served = start(failure="the engine stopped: rank 1 is gone")
    until(lambda: served.client.get("/health").status_code == 503)
    error = served.llm.error
    assert str(error) == "the engine stopped: rank 1 is gone. Look again."
    assert not served.llm.is_alive
    found = served.post(CHAT, DEFAULTS)
    assert found.status_code == 503


def test_a_model_that_is_not_there() -> None:
    model = json.dumps({"error": "no such model"})
    with pytest.raises(ModelNotFoundError, match=r"no such model\. Look again"):
        RemoteEngine(EngineConfig(model=model), worker=WORKER)


def test_the_engine_dies_with_its_parent() -> None:
    code = (
        "import json, time\n"
        "from nvcli.config import EngineConfig\n"
        "from nvcli.server.remote_engine import RemoteEngine\n"
        "config = EngineConfig(model=json.dumps({'answer': 'x'}))\n"
        f"llm = RemoteEngine(config, worker={WORKER!r})\n"
        "print(llm.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    until(lambda: not is_running(child), "the engine ends with its parent")


def test_close_ends_the_process(start: Start) -> None:
    served = start()
    pid = served.llm.pid
    served.chat()
    served.llm.close()
    assert not is_running(pid)


# --- what waits together -------------------------------------------------------------------------

PIECES = st.builds(
    RequestOutput,
    request_id=st.just("a"),
    index=st.integers(0, 1),
    text=st.sampled_from(["", "x", "yz"]),
    reasoning=st.sampled_from([None, "", "r"]),
    tool_calls=st.sampled_from([(), (), (ToolCall(0, "c", "f", "{"),)]),
    token_ids=st.sampled_from([(), (1,), (2, 3)]),
    finish_reason=st.sampled_from([None, None, None, FinishReason.STOP]),
    usage=st.builds(Usage, st.integers(0, 3), st.integers(0, 3)),
)


def told(outputs: list[RequestOutput], index: int) -> Any:
    """Everything in the order in which a stream tells it, and the last usage."""
    parts: list[tuple[str, str]] = []
    for output in outputs:
        if output.index != index:
            continue
        for kind, text in (("reasoning", output.reasoning or ""), ("text", output.text)):
            if text and parts and parts[-1][0] == kind:
                parts[-1] = (kind, parts[-1][1] + text)
            elif text:
                parts.append((kind, text))
        parts += [("call", call.arguments) for call in output.tool_calls]
        parts += [("end", "")] if output.is_finished else []
    own = [output for output in outputs if output.index == index]
    ids = [token_id for output in own for token_id in output.token_ids]
    opened = any(output.reasoning is not None for output in own)
    return parts, ids, opened, own[-1].usage if own else None


@given(st.lists(PIECES, max_size=8))
def test_joined_deltas_tell_the_same(outputs: list[RequestOutput]) -> None:
    packed = [pack_output(output) for output in outputs]
    unpacked = [unpack_output("a", item) for item in merge_packed(packed)]
    for index in (0, 1):
        assert told(merge_deltas(list(outputs)), index) == told(outputs, index)
        assert told(unpacked, index) == told(outputs, index)
    plain = [
        replace(output, tool_calls=(), reasoning=None, finish_reason=None, index=0)
        for output in outputs
    ]
    assert len(merge_deltas(plain)) == len(merge_packed([pack_output(o) for o in plain]))
    assert len(merge_deltas(plain)) <= 1
