"""Files and batches: OpenAI's shapes, the official client, cancel, restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from nvcli.server.config import ServerConfig
from tests.server.conftest import Serve, Served
from tests.waiting import until

CHAT = "/v1/chat/completions"


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": custom_id}]
    body = {"model": "scripted", "messages": messages, "max_tokens": 50, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def as_jsonl(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture
def client_of() -> Iterator[Any]:
    clients: list[OpenAI] = []

    def make(served: Served) -> OpenAI:
        client = OpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            max_retries=0,
            _strict_response_validation=True,
        )
        client.models.list()
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


def run_batch(client: OpenAI, data: bytes, endpoint: Any = CHAT, **options: Any) -> Any:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options
    )
    assert batch.status == "validating"
    return wait_for(client, batch.id)


def wait_for(client: OpenAI, batch_id: str) -> Any:
    def ended() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "cancelled", "expired") else None

    return until(ended, "the batch ends")


def wait_completed(client: OpenAI, batch_id: str, count: int) -> None:
    def is_so_far() -> bool:
        return bool(client.batches.retrieve(batch_id).request_counts.completed >= count)

    until(is_so_far, f"{count} requests are completed")


def lines_of(client: OpenAI, file_id: str) -> list[Any]:
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_a_batch_from_upload_to_output(serve: Serve, client_of: Any, tmp_path: Path) -> None:
    served = serve("<think>\nhm\n</think>\n\nHi 世!", config=ServerConfig(storage=tmp_path))
    client = client_of(served)
    records = [line("a"), line("b", n=2), line("c", temperature=9), line("d", logprobs=True)]
    batch = run_batch(client, as_jsonl(records), metadata={"k": "v"})
    assert batch.status == "completed", batch.errors
    assert batch.metadata == {"k": "v"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
    good = {value["custom_id"]: value for value in lines_of(client, batch.output_file_id)}
    assert set(good) == {"a", "b", "d"}
    assert set(good["a"]) == {"id", "custom_id", "response", "error"}
    body = good["a"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "Hi 世!"
    assert len(good["b"]["response"]["body"]["choices"]) == 2
    (bad,) = lines_of(client, batch.error_file_id)
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    assert [item.id for item in client.batches.list()] == [batch.id]
    purposes = sorted(item.purpose for item in client.files.list())
    assert purposes == ["batch", "batch_output", "batch_output"]
    served.wait_idle()


def answer_all(client: OpenAI, url: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """(status, body) of a batch of `bodies`, in their order."""
    records = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": {"model": "scripted", **body}}
        for i, body in enumerate(bodies)
    ]
    batch = run_batch(client, as_jsonl(records), url)
    assert batch.status == "completed", batch.errors
    files = [file for file in (batch.output_file_id, batch.error_file_id) if file]
    found = {int(v["custom_id"]): v["response"] for file in files for v in lines_of(client, file)}
    return [(found[i]["status_code"], found[i]["body"]) for i in range(len(bodies))]


def test_a_batch_of_embeddings(serve: Serve, client_of: Any, tmp_path: Path) -> None:
    """The same bodies as the endpoint gives, and the same refusals."""
    served = serve("x", config=ServerConfig(storage=tmp_path))
    bodies: list[dict[str, Any]] = [
        {"input": "hello"},
        {"input": ["a", "b"], "dimensions": 32},
        {"input": [1, 2, 3], "encoding_format": "base64"},
        {"input": "hello", "dimensions": 65},
        {"input": ""},
        {"input": "x" * 2000},
    ]
    answers = answer_all(client_of(served), "/v1/embeddings", bodies)
    for body, (status, answer) in zip(bodies, answers, strict=True):
        direct = served.post("/v1/embeddings", {"model": "scripted", **body})
        assert status == direct.status_code
        if status == 200:
            assert answer == direct.json()
        else:
            assert answer["error"]["code"] == direct.json()["error"]["code"]
    served.wait_idle()


def test_a_batch_of_responses(serve: Serve, client_of: Any, tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    served = serve(f"<think>\nhm\n</think>\n\nHi!{call}", config=ServerConfig(storage=tmp_path))
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    include = ["message.output_text.logprobs"]
    bodies: list[dict[str, Any]] = [
        {"input": "hello", "tools": [look], "instructions": "Be terse."},
        {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 3, "include": include},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "background": True},
        {"input": "x", "tools": [{"type": "mcp", "server_label": "m"}]},
        {"input": [{"type": "item_reference", "id": "nope"}]},
        {"input": []},
    ]
    client = client_of(served)
    answers = answer_all(client, "/v1/responses", bodies)
    assert [status for status, _ in answers] == [200, 200, 400, 400, 400, 400, 400]

    def clean(value: Any) -> Any:
        skip = ("id", "call_id", "created_at", "completed_at", "store", "cached_tokens", "seed")
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in skip}
        return [clean(v) for v in value] if isinstance(value, list) else value

    for body, (_, answer) in zip(bodies[:2], answers, strict=False):
        direct = served.post("/v1/responses", {"model": "scripted", **body}).json()
        assert clean(answer) == clean(direct)
        assert answer["store"] is False
        assert served.client.get(f"/v1/responses/{answer['id']}").status_code == 404
    assert answers[2][1]["error"]["param"] == "previous_response_id"


def test_files(serve: Serve, client_of: Any, tmp_path: Path) -> None:
    served = serve("x", config=ServerConfig(storage=tmp_path))
    client = client_of(served)
    data = b'{"a": "\r\n--\xff"}\n\r\n'
    file = client.files.create(file=("na/me.jsonl", data), purpose="batch")
    assert file.bytes == len(data)
    assert client.files.content(file.id).read() == data
    assert client.files.retrieve(file.id).filename == file.filename
    assert client.files.delete(file.id).deleted
    for path in (f"/v1/files/{file.id}", "/v1/files/..%2f..%2fetc", "/v1/files/x/content"):
        assert (
            client._client.get(str(client.base_url).removesuffix("/v1/") + path).status_code == 404
        )


def test_bad_uploads(serve: Serve, tmp_path: Path) -> None:
    served = serve("x", config=ServerConfig(storage=tmp_path))
    post = served.client.post
    assert post("/v1/files", json={}).status_code == 415
    assert post("/v1/files", files={"file": b"x"}, data={"purpose": "fine-tune"}).status_code == 400
    assert post("/v1/files", files={"other": b"x"}, data={"purpose": "batch"}).status_code == 400
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x"):
        assert post("/v1/files", content=b"junk", headers={"content-type": kind}).status_code == 400
    assert not list((tmp_path / "files").iterdir())


def test_without_storage_they_are_not_there(serve: Serve) -> None:
    served = serve("x")
    for path in ("/v1/files", "/v1/batches"):
        response = served.client.get(path)
        assert response.status_code == 404
        assert "--storage" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("records", "code", "number"),
    [
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([{**line("a"), "url": "/v1/embeddings"}], "invalid_url", 1),
        ([{**line("a"), "method": "GET"}], "invalid_method", 1),
        ([{**line("a"), "custom_id": None}], "missing_custom_id", 1),
        ([line("a", model="other")], "model_not_found", 1),
        ([line("a", stream=True)], "invalid_body", 1),
        ([5], "invalid_json_line", 1),
        ([], "empty_file", None),
    ],
)
def test_a_file_that_is_no_batch_fails(
    serve: Serve, client_of: Any, tmp_path: Path, records: Any, code: str, number: Any
) -> None:
    client = client_of(serve("x", config=ServerConfig(storage=tmp_path)))
    batch = run_batch(client, as_jsonl(records) or b"\n")
    assert batch.status == "failed"
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    assert batch.failed_at


def test_bad_batches(serve: Serve, tmp_path: Path) -> None:
    served = serve("x", config=ServerConfig(storage=tmp_path))
    made = served.client.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"}).json()
    good = {"input_file_id": made["id"], "endpoint": CHAT, "completion_window": "24h"}
    for fields, status in (
        ({"input_file_id": "file-x"}, 404),
        ({"endpoint": "/v1/rerank"}, 400),
        ({"completion_window": "1h"}, 400),
        ({"completion_window": None}, 400),
        ({"metadata": {"a": 5}}, 400),
    ):
        assert served.post("/v1/batches", {**good, **fields}).status_code == status
    assert served.client.get("/v1/batches/batch_x").status_code == 404
    assert served.client.post("/v1/batches/batch_x/cancel").status_code == 404


def test_cancel_keeps_what_is_done(serve: Serve, client_of: Any, tmp_path: Path) -> None:
    config = ServerConfig(storage=tmp_path)
    served = serve("x" * 40, config=config, delay_s=0.02, max_num_seqs=2)
    client = client_of(served)
    file = client.files.create(
        file=("in.jsonl", as_jsonl([line(str(i)) for i in range(40)])), purpose="batch"
    )
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    wait_completed(client, batch.id, 2)
    assert served.chat()["choices"]  # others are answered beside it
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = wait_for(client, batch.id)
    assert done.status == "cancelled"
    assert 2 <= done.request_counts.completed < 40
    assert done.request_counts.failed == 0
    assert len(lines_of(client, done.output_file_id)) == done.request_counts.completed
    served.wait_idle()
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_restarted_server_goes_on(serve: Serve, client_of: Any, tmp_path: Path) -> None:
    config = ServerConfig(storage=tmp_path)
    first = serve("x" * 30, config=config, delay_s=0.02, max_num_seqs=2)
    client = client_of(first)
    file = client.files.create(
        file=("in.jsonl", as_jsonl([line(str(i)) for i in range(30)])), purpose="batch"
    )
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    wait_completed(client, batch.id, 3)
    first.app.state.batches.stop()
    first.wait_idle()
    second = serve("x" * 30, config=config)
    again = client_of(second)
    done = wait_for(again, batch.id)
    assert done.status == "completed"
    assert done.request_counts.completed == 30
    ids = [value["custom_id"] for value in lines_of(again, done.output_file_id)]
    assert sorted(ids, key=int) == [str(i) for i in range(30)]
    assert len(second.llm.prompts) < 30  # finished lines were not run again


def test_the_input_of_an_open_batch_stays(
    serve: Serve, client_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that has vanished all the same fails the batch, in words without a path of ours."""
    served = serve("x" * 30, config=ServerConfig(storage=tmp_path))
    client = client_of(served)
    served.llm.device.gate.clear()
    files = [
        client.files.create(file=("in.jsonl", as_jsonl([line("a")])), purpose="batch")
        for _ in range(2)
    ]
    batches = [
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        for file in files
    ]
    response = served.client.delete(f"/v1/files/{files[0].id}")
    assert response.status_code == 409
    assert batches[0].id in response.json()["error"]["message"]
    (tmp_path / "files" / files[1].id).unlink()
    served.llm.device.gate.set()
    assert wait_for(client, batches[0].id).status == "completed"
    gone = wait_for(client, batches[1].id)
    assert gone.status == "failed"
    assert [error.message for error in gone.errors.data] == ["the input file is gone"]
    assert client.files.delete(files[0].id).deleted
    assert not caplog.records
