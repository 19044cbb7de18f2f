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


def test_an_item_that_is_given_twice_does_not_go_round() -> None:
    items = [{"id": name} for name in "aba"]
    assert page(items, limit=2, order="asc", after="a")["data"] == []
