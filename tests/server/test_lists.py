"""Every endpoint that lists: pages both ways, cursors that are not there, bad limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvcli.server.config import ServerConfig
from nvcli.server.store import page
from tests.server.conftest import Serve, Served
from tests.server.test_http import check_error
from tests.waiting import until

KIND = {"content-type": "multipart/form-data; boundary=b"}
HEAD = '--b\r\nContent-Disposition: form-data; name="'
FORM = f'{HEAD}purpose"\r\n\r\nbatch\r\n{HEAD}file"; filename="x"\r\n\r\n{{}}\r\n--b--\r\n'


def add_file(served: Served) -> str:
    response = served.client.post("/v1/files", content=FORM.encode(), headers=KIND)
    return str(response.json()["id"])


def files(served: Served) -> str:
    for _ in range(5):
        add_file(served)
    return "/v1/files"


def batches(served: Served) -> str:
    chat = "/v1/chat/completions"
    window = {"endpoint": chat, "completion_window": "24h", "input_file_id": add_file(served)}
    for _ in range(5):
        assert served.post("/v1/batches", window).status_code == 200
    return "/v1/batches"


def completions(served: Served) -> str:
    for _ in range(5):
        served.chat(store=True)
    return "/v1/chat/completions"


def messages(served: Served) -> str:
    texts = [{"role": "user", "content": text} for text in "abcde"]
    answer = served.chat(store=True, messages=texts)
    return f"/v1/chat/completions/{answer['id']}/messages"


def input_items(served: Served) -> str:
    items = [{"role": "user", "content": text} for text in "abcde"]
    answer = served.post("/v1/responses", {"model": "scripted", "input": items}).json()
    return f"/v1/responses/{answer['id']}/input_items"


@pytest.mark.parametrize("make", [files, batches, completions, messages, input_items])
def test_lists(serve: Serve, tmp_path: Path, make: Callable[[Served], str]) -> None:
    served = serve("x", config=ServerConfig(storage=tmp_path))
    path = make(served)

    def get(**params: Any) -> Any:
        return served.client.get(path, params=params)

    def ids(**params: Any) -> list[str]:
        return [item["id"] for item in get(**params).json()["data"]]

    whole = ids(order="asc")
    assert len(set(whole)) == 5
    assert ids(order="desc") == whole[::-1]
    first = get(order="asc", limit=2).json()
    assert (first["first_id"], first["last_id"]) == (whole[0], whole[1])
    assert first["has_more"] is True
    assert ids(order="asc", limit=2, after=first["last_id"]) == whole[2:4]
    assert ids(order="asc", after=whole[4]) == []
    assert ids(order="asc", limit=2, before=whole[4]) == whole[2:4]
    assert ids(order="asc", after=whole[0], before=whole[3]) == whole[1:3]
    assert ids(order="asc", after="") == whole  # of a shell's variable that is not set yet

    for name in ("after", "before"):
        for value in ("file-000000000000000000000000", "x" * 9000, "\x00", "../.."):
            error = check_error(get(**{name: value}), 404, "not_found")
            assert error["param"] == name
            assert error["message"].startswith(f"{name}: this list has no ")
    for name, values in (
        ("limit", ("0", "-1", "10001", "1.5", "x", "", "٣", "9" * 5000)),
        ("order", ("up", "ASC", "")),
    ):
        for value in values:
            error = check_error(get(**{name: value}), 400)
            assert error["param"] == name


def test_what_is_made_within_a_second_stays_in_order(serve: Serve, tmp_path: Path) -> None:
    """So that a page begun before it was made does not miss it, and the next server takes batches
    in the order in which they came."""
    config = ServerConfig(storage=tmp_path)
    served = serve("x", config=config)
    made = {"/v1/files": [add_file(served) for _ in range(9)], "/v1/batches": []}
    fields = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for file_id in made["/v1/files"]:
        answer = served.post("/v1/batches", {**fields, "input_file_id": file_id})
        made["/v1/batches"].append(answer.json()["id"])
    batches = served.app.state.batches
    assert batches is not None
    assert batches._thread is not None
    batches.stop()
    until(lambda: not batches._thread.is_alive(), "the folder is the next server's")
    for each in (served, serve("x", config=config)):
        for path, ids in made.items():
            listed = each.client.get(path, params={"order": "asc", "limit": 100}).json()["data"]
            assert [item["id"] for item in listed if item["id"] in ids] == ids


def test_an_object_that_cannot_be_read_is_left_out(serve: Serve, tmp_path: Path) -> None:
    served = serve("x", config=ServerConfig(storage=tmp_path))
    file_id = add_file(served)
    for number, text in enumerate(("", "[]", "null", '"x"', "{}", "\\xff")):
        (tmp_path / "files" / f"file-{number:024}.json").write_text(text)
    listed = served.client.get("/v1/files").json()["data"]
    assert [item["id"] for item in listed] == [file_id]


def test_an_item_that_is_given_twice_does_not_go_round() -> None:
    items = [{"id": name} for name in "aba"]
    assert page(items, limit=2, order="asc", after="a")["data"] == []
