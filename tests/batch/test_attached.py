"""`--attach`: a server answers, and the lines are those of a run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nvcli.batch import attached
from nvcli.batch.attached import HttpEngine
from nvcli.batch.job import run_job
from nvcli.batch.options import BatchOptions, OutputFormat, ProgressMode
from nvcli.batch.progress import Progress
from nvcli.client import ServerModel
from nvcli.config import EngineConfig
from nvcli.errors import EngineClosedError, NvcliError, UsageError
from tests.batch.support import read_lines, write_lines

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]


class FakeServer:
    """Where `ServerModel` stands; `answer(number, body)` gives the response of a request."""

    model_name, root, max_num_seqs, max_model_len = "m", "m", 4, 100

    def __init__(self, answer: Callable[[int, dict[str, Any]], httpx.Response]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answer = answer

    def async_client(self) -> httpx.AsyncClient:
        def handle(request: httpx.Request) -> httpx.Response:
            self.bodies.append(json.loads(request.content))
            return self._answer(len(self.bodies), self.bodies[-1])

        return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://x")

    def close(self) -> None:
        pass


def run(source: Path, out: Path, engine: Any, **options: Any) -> int:
    return run_job(
        BatchOptions(input=str(source), output=out, **{"seed": 3, **options}),
        EngineConfig(),
        find_model=lambda: "a model",
        load=lambda: engine,
        progress=Progress(ProgressMode.NONE),
    )


def ask(tmp_path: Path, server: FakeServer, records: list[Any], **options: Any) -> list[Any]:
    source = write_lines(tmp_path / "in.jsonl", records)
    run(source, tmp_path / "out.jsonl", HttpEngine(server, EngineConfig()), force=True, **options)  # type: ignore[arg-type]
    return read_lines(tmp_path / "out.jsonl")


def said(text: str, **more: Any) -> httpx.Response:
    choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
    return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": 3}, **more})


# --- what goes out and comes back ----------------------------------------------------------------


def test_flags_lie_below_the_record(tmp_path: Path) -> None:
    server = FakeServer(lambda _, body: said("x"))
    records = [
        {"prompt": "a"},
        {"prompt": "a", "temperature": 0.1, "seed": 5, "enable_thinking": True},
        {"custom_id": "c", "url": CHAT, "body": {"messages": USER, "max_completion_tokens": 5}},
    ]
    flags = {"temperature": 0.9, "max_tokens": 7, "stop": ("x",)}
    ask(tmp_path, server, records, sampling=flags, think=False, system="be brief")
    own = next(body for body in server.bodies if body["seed"] == 5)
    third = next(body for body in server.bodies if "max_completion_tokens" in body)
    (first,) = (body for body in server.bodies if body not in (own, third))
    assert (first["temperature"], first["max_tokens"], first["stop"]) == (0.9, 7, ["x"])
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert first["messages"][0] == {"role": "system", "content": "be brief"}
    assert first["model"] == "m"
    assert own["temperature"] == 0.1
    assert "chat_template_kwargs" not in own
    assert "max_tokens" not in third
    assert len({body["seed"] for body in server.bodies}) == 3


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    def answer(number: int, body: dict[str, Any]) -> httpx.Response:
        if number <= 3:
            return httpx.Response(429 if number % 2 else 503, headers={"retry-after": "0.01"})
        if number == 4:
            raise httpx.RemoteProtocolError("Server disconnected")
        return said("x")

    lines = ask(tmp_path, FakeServer(answer), [{"prompt": str(i)} for i in range(5)])
    assert [line["text"] for line in lines] == ["x"] * 5


@pytest.mark.parametrize("status", [401, None])
def test_a_server_that_is_gone_ends_the_run_and_costs_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    monkeypatch.setattr(attached, "RETRIES", 1)

    def answer(number: int, body: dict[str, Any]) -> httpx.Response:
        if number <= 20:
            return said("x")
        if status is None:
            raise httpx.ConnectError("All connection attempts failed")
        return httpx.Response(status, json={"error": {"message": "no"}})

    with pytest.raises(EngineClosedError, match=r"(cannot reach|another key).*records are safe"):
        ask(tmp_path, FakeServer(answer), [{"prompt": str(i)} for i in range(50)])
    lines = read_lines(tmp_path / "out.jsonl")
    assert 10 < len(lines) <= 20
    assert all(line["error"] is None for line in lines)


def test_what_the_server_refuses_costs_that_record(tmp_path: Path) -> None:
    def answer(number: int, body: dict[str, Any]) -> httpx.Response:
        match body["messages"][-1]["content"]:
            case "long":
                error = {"message": "too long", "code": "context_length_exceeded"}
                return httpx.Response(400, json={"error": error})
            case "broken":
                return httpx.Response(500, text="<html>")
            case "odd":
                return httpx.Response(200, json={"choices": []})
            case "none":
                return httpx.Response(200, text="no JSON")
        return said("x")

    records = [{"id": word, "prompt": word} for word in ("a", "long", "broken", "odd", "none", "b")]
    lines = ask(tmp_path, FakeServer(answer), records)
    codes = [line["error"] and line["error"]["code"] for line in lines]
    assert codes == [None, "context_length_exceeded", "request_error", *["server_error"] * 2, None]
    lines = ask(tmp_path, FakeServer(answer), records[1:2], output_format=OutputFormat.OPENAI)
    assert lines[0]["response"]["status_code"] == 400


def test_a_schema_that_the_server_refuses_ends_the_run(tmp_path: Path) -> None:
    server = FakeServer(
        lambda number, body: httpx.Response(400, json={"error": {"message": "no such type"}})
    )
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
    with pytest.raises(UsageError, match="--schema: no such type"):
        ask(tmp_path, server, [{"prompt": "a"}], response_format=shape)
    assert not (tmp_path / "out.jsonl").exists()


# --- the real thing ------------------------------------------------------------------------------

RECORDS: list[Any] = [
    {"id": "a", "prompt": "What is the capital of France?"},
    {"id": "b", "messages": USER, "temperature": 0.9},
    {"id": "c", "prompt": "The sky", "raw": True, "max_tokens": 10},
    {"id": "d", "prompt": [5, 6, 7], "max_tokens": 5},
    {"id": "e", "prompt": "x", "n": 3, "max_tokens": 4},
    {"id": "f", "prompt": "x", "logit_bias": {"999999": 1}},
    {"id": "g", "prompt": "x", "guided_choice": ["yes", "no"]},
    {"id": "h", "prompt": "x", "guided_json": {"type": "wrong"}},
    "{bad",
    *(
        {"custom_id": f"o{number}", "url": url, "body": body}
        for number, (url, body) in enumerate(
            [
                (CHAT, {"messages": USER, "n": 2, "max_tokens": 6, "logprobs": True}),
                ("/v1/completions", {"prompt": "a", "max_tokens": 6}),
                ("/v1/embeddings", {"input": ["a", "b"]}),
                ("/v1/responses", {"input": "hi", "max_output_tokens": 9}),
            ]
        )
    ),
]
_PASSING = {"timings", "created", "created_at", "completed_at", "id", "request_id", "model"}
_PASSING |= {"prompt_tokens_details", "input_tokens_details"}  # cached tokens


def check_equal(one: Any, other: Any) -> None:
    """But for what two equal runs differ in; numbers round otherwise in another batch."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - _PASSING:
            check_equal(one[key], other[key])
    elif isinstance(one, list):
        for mine, theirs in zip(one, other, strict=True):
            check_equal(mine, theirs)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-3)
    else:
        assert one == other


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    from nvcli.llm import LLM
    from nvcli.server.config import ServerConfig
    from tests.server.conftest import Served

    served = Served(LLM("demo", device="cpu"), ServerConfig())
    yield served
    served.close()


class Kept:
    """An engine that a run does not close."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def close(self) -> None:
        pass


@pytest.mark.torch
@pytest.mark.parametrize("output_format", [OutputFormat.AUTO, OutputFormat.SIMPLE])
def test_a_server_gives_the_lines_that_this_process_gives(
    tmp_path: Path, served: Any, output_format: OutputFormat
) -> None:
    source = write_lines(tmp_path / "in.jsonl", RECORDS)
    options: dict[str, Any] = {
        "output_format": output_format,
        "think": False,
        "sampling": {"max_tokens": 12},
        "system": "Be brief.",
    }
    engine = HttpEngine(ServerModel(served.url), EngineConfig())
    assert run(source, tmp_path / "there.jsonl", engine, **options) == 4
    assert run(source, tmp_path / "here.jsonl", Kept(served.llm), **options) == 4
    here, there = (read_lines(tmp_path / f"{name}.jsonl") for name in ("here", "there"))
    if output_format is OutputFormat.SIMPLE:  # log-probabilities come in OpenAI's envelope only
        for line in (*here, *there):
            for answer in (line, *line.get("choices", ())):
                answer.pop("logprobs", None)
    check_equal(there, here)


@pytest.mark.torch
def test_a_run_goes_on_here_when_the_server_is_gone(
    tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "RETRIES", 0)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"Say {i}"} for i in range(60)])
    options: dict[str, Any] = {"think": False, "sampling": {"max_tokens": 8}}
    run(source, tmp_path / "clean.jsonl", Kept(served.llm), **options)
    out = tmp_path / "out.jsonl"
    server = ServerModel(served.url)
    server.max_num_seqs = 2  # requests at once
    engine = HttpEngine(server, EngineConfig())
    answers: list[httpx.Response] = []

    async def leave(response: httpx.Response) -> None:
        answers.append(response)
        if len(answers) == 12:
            await engine._http.aclose()

    engine._http.event_hooks = {"response": [leave]}
    with pytest.raises((NvcliError, RuntimeError)):
        run(source, out, engine, **options)
    assert 5 <= len(read_lines(out)) <= 12
    run(source, out, Kept(served.llm), resume=True, **options)
    texts = [
        [line["text"] for line in read_lines(path)] for path in (out, tmp_path / "clean.jsonl")
    ]
    assert texts[0] == texts[1]
