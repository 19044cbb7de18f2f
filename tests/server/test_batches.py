"""Files and batches: OpenAI's shapes, the official client, cancel, restart."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nvcli.errors import EngineClosedError, UsageError
from nvcli.server import batch_object
from nvcli.server import batches as batches_module
from nvcli.server.batches import BatchManager
from nvcli.server.config import ServerConfig
from nvcli.server.errors import NotFoundError
from nvcli.server.files import FileStore
from tests.server.conftest import Serve, Served
from tests.server.test_openai_client import client_of
from tests.waiting import until

if TYPE_CHECKING:
    from openai import OpenAI  # takes a second: only where it is used

CHAT = "/v1/chat/completions"
Storing = Callable[..., tuple[Served, Any]]


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": custom_id}]
    body = {"model": "scripted", "messages": messages, "max_tokens": 50, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def as_jsonl(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture
def storing(serve: Serve, tmp_path: Path) -> Iterator[Storing]:
    """`storing("text")`: a server with a storage, the same each time, and OpenAI's client of it."""
    clients: list[OpenAI] = []

    def start(script: str, **options: Any) -> tuple[Served, OpenAI]:
        served = serve(script, config=ServerConfig(storage=tmp_path), **options)
        client = client_of(served)
        client.models.list()
        clients.append(client)
        return served, client

    yield start
    for client in clients:
        client.close()


def test_forms(storing: Storing) -> None:
    served, _ = storing("x")
    kind = {"content-type": "multipart/form-data; boundary=b"}

    def upload(*heads: str) -> Any:
        body = ""
        for head in heads:
            value = "batch" if "purpose" in head else "{}"
            body += f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n"
        return served.client.post("/v1/files", content=f"{body}--b--\r\n".encode(), headers=kind)

    plain = upload("name=purpose", "name=file; filename=x.jsonl")
    assert plain.status_code == 200, plain.text
    assert plain.json()["filename"] == "x.jsonl"
    quoted = upload('filename="a b.jsonl"; name="file"', 'name="purpose"')
    assert quoted.json()["filename"] == "a b.jsonl"
    for heads, param in (
        (('name="purpose"', 'name="file"', 'name="expires_after[seconds]"'), "expires_after"),
        (('name="purpose"', 'filename="x"'), None),
    ):
        refused = upload(*heads)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


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


def test_a_batch_from_upload_to_output(storing: Storing) -> None:
    served, client = storing("<think>\nhm\n</think>\n\nHi 世!")
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


def test_a_batch_of_embeddings(storing: Storing) -> None:
    """The same bodies as the endpoint gives, and the same refusals."""
    served, client = storing("x")
    bodies: list[dict[str, Any]] = [
        {"input": "hello"},
        {"input": ["a", "b"], "dimensions": 32},
        {"input": [1, 2, 3], "encoding_format": "base64"},
        {"input": "hello", "dimensions": 65},
        {"input": ""},
        {"input": "x" * 2000},
    ]
    answers = answer_all(client, "/v1/embeddings", bodies)
    for body, (status, answer) in zip(bodies, answers, strict=True):
        direct = served.post("/v1/embeddings", {"model": "scripted", **body})
        assert status == direct.status_code
        if status == 200:
            assert answer == direct.json()
        else:
            assert answer["error"]["code"] == direct.json()["error"]["code"]
    served.wait_idle()


def test_a_batch_of_responses(storing: Storing) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    served, client = storing(f"<think>\nhm\n</think>\n\nHi!{call}")
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


def test_files(storing: Storing) -> None:
    _, client = storing("x")
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


def test_bad_uploads(storing: Storing, tmp_path: Path) -> None:
    served, _ = storing("x")
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
        ([line("a", model=None)], "invalid_body", 1),
        ([line("a", model=["scripted"])], "invalid_body", 1),
        ([line("a", stream=True)], "invalid_body", 1),
        ([5], "invalid_json_line", 1),
        ([], "empty_file", None),
    ],
)
def test_a_file_that_is_no_batch_fails(
    storing: Storing, records: Any, code: str, number: Any
) -> None:
    _, client = storing("x")
    batch = run_batch(client, as_jsonl(records) or b"\n")
    assert batch.status == "failed"
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    assert batch.failed_at


def test_a_line_says_what_is_missing_and_what_is_no_text(storing: Storing) -> None:
    _, client = storing("x")
    records = [
        line("a", model=None),
        line("b", model=5),
        {**line("c"), "custom_id": ""},
        {**line("d"), "custom_id": 5},
    ]
    errors = run_batch(client, as_jsonl(records)).errors.data
    assert [error.message for error in errors] == [
        "body.model is missing",
        "body.model must be text, got a number",
        "custom_id is missing",
        "custom_id must be text, got a number",
    ]


def test_bad_batches(storing: Storing) -> None:
    served, _ = storing("x")
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


def check_parted(client: OpenAI, batch: Any, total: int, code: str) -> int:
    """Every request is in one of the files, those without an answer with `code`; -> answered."""
    good = lines_of(client, batch.output_file_id) if batch.output_file_id else []
    bad = lines_of(client, batch.error_file_id)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (total, len(good), len(bad))
    ids = [value["custom_id"] for value in good + bad]
    assert sorted(ids, key=int) == [str(i) for i in range(total)]
    assert all(value["error"] is None and value["response"] for value in good)
    for value in bad:
        assert set(value) == {"id", "custom_id", "response", "error"}
        assert value["response"] is None
        assert value["error"]["code"] == code
    assert len({value["id"] for value in good + bad}) == total
    return len(good)


def test_cancel_keeps_what_is_done(storing: Storing) -> None:
    served, client = storing("x" * 40, delay_s=0.02, max_num_seqs=2)
    _, (batch_id,) = start(client, as_jsonl([line(str(i)) for i in range(40)]))
    wait_completed(client, batch_id, 2)
    assert served.chat()["choices"]  # others are answered beside it
    assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
    done = wait_for(client, batch_id)
    assert done.status == "cancelled"
    assert 2 <= done.request_counts.completed < 40
    check_parted(client, done, 40, "batch_cancelled")
    served.wait_idle()
    assert client.batches.cancel(batch_id).status == "cancelled"


def test_a_batch_that_is_out_of_time_expires(
    storing: Storing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_object, "WINDOW_S", 1)
    served, client = storing("x" * 30)
    served.llm.device.gate.clear()
    _, (batch_id,) = start(client, as_jsonl([line(str(i)) for i in range(5)]))
    done = wait_for(client, batch_id)
    assert done.status == "expired"
    assert check_parted(client, done, 5, "batch_expired") == 0
    served.llm.device.gate.set()


def test_the_engine_dies_in_a_batch(
    storing: Storing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was answered until then is not lost, and what was not can be asked again."""
    served, client = storing("x" * 40, delay_s=0.02, max_num_seqs=2)
    _, (batch_id,) = start(client, as_jsonl([line(str(i)) for i in range(40)]))
    wait_completed(client, batch_id, 2)
    served.llm._thread.fail(EngineClosedError("the GPU is lost"))
    done = wait_for(client, batch_id)
    assert done.status == "failed"
    assert [error.message for error in done.errors.data] == ["the GPU is lost"]
    assert 2 <= check_parted(client, done, 40, "batch_failed") < 40
    assert [record.getMessage() for record in caplog.records] == [
        f"batch {batch_id} failed: the GPU is lost"
    ]
    stop(served)
    assert [path.name for path in (tmp_path / "batches").glob("batch_*")] == [f"{batch_id}.json"]
    _, again = storing("x")  # the next server has it as it was
    assert again.batches.retrieve(batch_id) == done


def test_a_cancelled_batch_of_a_server_that_was_killed_as_it_wrote(
    storing: Storing, tmp_path: Path
) -> None:
    served, client = storing("x" * 40, delay_s=0.02, max_num_seqs=2)
    _, (batch_id,) = start(client, as_jsonl([line(str(i)) for i in range(40)]))
    wait_completed(client, batch_id, 2)
    stop(served)
    folder = tmp_path / "batches"
    with (folder / f"{batch_id}.out.jsonl").open("ab") as file:
        file.write(b'{"id": "batch_req_')
    path = folder / f"{batch_id}.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "status": "cancelling"}))
    _, again = storing("x")
    done = wait_for(again, batch_id)
    assert done.status == "cancelled"
    assert check_parted(again, done, 40, "batch_cancelled") >= 2


def test_a_restarted_server_goes_on(storing: Storing) -> None:
    first, client = storing("x" * 30, delay_s=0.02, max_num_seqs=2)
    _, (batch_id,) = start(client, as_jsonl([line(str(i)) for i in range(30)]))
    wait_completed(client, batch_id, 3)
    stop(first)
    first.wait_idle()
    second, again = storing("x" * 30)
    done = wait_for(again, batch_id)
    assert done.status == "completed"
    assert done.request_counts.completed == 30
    ids = [value["custom_id"] for value in lines_of(again, done.output_file_id)]
    assert sorted(ids, key=int) == [str(i) for i in range(30)]
    assert len(second.llm.prompts) < 30  # finished lines were not run again


def start(client: OpenAI, *files: bytes) -> tuple[list[str], list[str]]:
    """-> ids of the files and of a batch of each; only the first gets its turn while it runs."""
    made = [client.files.create(file=("in.jsonl", data), purpose="batch").id for data in files]
    batches = [
        client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h").id
        for file_id in made
    ]
    return made, batches


ONE = as_jsonl([line("a")])


def stop(served: Served) -> None:
    """As the end of a server does it, however long it takes."""
    served.app.state.batches.stop()
    wait_left_off(served)


def wait_left_off(served: Served) -> None:
    thread = served.app.state.batches._thread
    until(lambda: not thread.is_alive(), "the thread of the batches ends")


def test_the_input_of_an_open_batch_stays(
    storing: Storing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that has vanished all the same fails the batch."""
    served, client = storing("x" * 30)
    served.llm.device.gate.clear()
    files, batches = start(client, ONE, ONE)
    response = served.client.delete(f"/v1/files/{files[0]}")
    assert response.status_code == 409
    assert batches[0] in response.json()["error"]["message"]
    (tmp_path / "files" / files[1]).unlink()
    assert served.client.get(f"/v1/files/{files[1]}/content").status_code == 404
    served.llm.device.gate.set()
    assert wait_for(client, batches[0]).status == "completed"
    gone = wait_for(client, batches[1])
    assert gone.status == "failed"
    assert [error.message for error in gone.errors.data] == ["the input file is gone"]
    assert client.files.delete(files[0]).deleted
    assert not caplog.records


def test_a_batch_that_waits_for_its_turn_is_cancelled_at_once(storing: Storing) -> None:
    """It would hold its input until the batches before it are over."""
    served, client = storing("x" * 30)
    served.llm.device.gate.clear()
    files, batches = start(client, ONE, ONE, ONE)
    assert client.batches.cancel(batches[1]).status == "cancelled"
    assert client.files.delete(files[1]).deleted
    served.llm.device.gate.set()
    assert [wait_for(client, id_).status for id_ in batches] == [
        "completed",
        "cancelled",
        "completed",
    ]


def test_no_batch_begins_with_a_file_that_has_just_gone(tmp_path: Path) -> None:
    """Its endpoint has looked for it, and reads on."""
    files = FileStore(tmp_path)
    manager = BatchManager(tmp_path, files)
    file_id = files.add(ONE, "in.jsonl", "batch")["id"]
    manager.delete_file(file_id)
    with pytest.raises(NotFoundError):
        manager.create(file_id, CHAT, "24h", {})
    assert manager.all() == []
    manager.stop()


def test_a_storage_is_one_servers(storing: Storing, tmp_path: Path) -> None:
    """Another would run the same batches. It may begin once the first one takes nothing more."""
    first, client = storing("x" * 30)
    first.llm.device.gate.clear()
    (file_id,), (batch_id,) = start(client, ONE)
    with pytest.raises(UsageError, match=f"another server has {tmp_path}"):
        storing("x")
    stop(first)
    _, second = storing("x")
    assert wait_for(second, batch_id).status == "completed"
    for refused in (
        first.client.delete(f"/v1/files/{file_id}"),
        first.client.post(f"/v1/batches/{batch_id}/cancel"),
    ):
        assert refused.status_code == 503
    first.llm.device.gate.set()


def test_a_full_disk_ends_no_more_than_it_must(
    storing: Storing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that cannot be kept is not there, one whose end cannot be written is over, and those
    behind it have their turn."""
    served, client = storing("x" * 30)
    served.llm.device.gate.clear()
    _, batches = start(client, ONE, ONE)
    until(lambda: client.batches.retrieve(batches[0]).status == "in_progress", "it has begun")
    full = {batches[0]}
    write = batches_module.write_json

    def write_json(path: Path, value: dict[str, Any]) -> None:
        if "all" in full or path.stem in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, value)

    monkeypatch.setattr(batches_module, "write_json", write_json)
    full.add("all")
    file = client.files.create(file=("in.jsonl", ONE), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    assert served.post("/v1/batches", body).status_code == 500
    assert client.files.delete(file.id).deleted
    assert {batch.id for batch in client.batches.list()} == set(batches)
    full.discard("all")
    served.llm.device.gate.set()
    failed = wait_for(client, batches[0])
    assert failed.errors.data[0].message == "the server's storage: No space left on device"
    assert wait_for(client, batches[1]).status == "completed"


def test_a_failed_batch_tells_no_folder_of_the_servers(storing: Storing, tmp_path: Path) -> None:
    served, client = storing("x" * 30)
    served.llm.device.gate.clear()
    _, batches = start(client, ONE, ONE)
    (tmp_path / "batches" / f"{batches[1]}.out.jsonl").mkdir()
    served.llm.device.gate.set()
    failed = wait_for(client, batches[1])
    assert failed.status == "failed"
    assert failed.errors.data[0].message == f"{batches[1]}.out.jsonl is a folder"


def test_batches_behind_the_one_that_the_engine_died_in_wait_for_the_next_server(
    storing: Storing,
) -> None:
    served, client = storing("x" * 30)
    served.llm.device.gate.clear()
    _, batches = start(client, ONE, ONE)
    until(lambda: served.llm.requests, "the first one runs")
    served.llm._thread.fail(EngineClosedError("the GPU is lost"))
    served.llm.device.gate.set()
    assert wait_for(client, batches[0]).status == "failed"
    wait_left_off(served)
    assert client.batches.retrieve(batches[1]).status == "validating"
    _, again = storing("x")
    assert wait_for(again, batches[1]).status == "completed"
