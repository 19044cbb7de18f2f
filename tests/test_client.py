"""ServerModel: what it makes of servers that are none of OpenAI's API."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from nvcli.client import ServerError, ServerModel
from nvcli.errors import UsageError


def serve(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    """Every server answers GET /v1/models so."""

    def handle(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("GET", "/v1/models")
        return httpx.Response(200, json=answer)

    transport = httpx.MockTransport(handle)
    monkeypatch.setattr(httpx, "HTTPTransport", lambda **options: transport)


@pytest.mark.parametrize("answer", [{}, [], {"data": []}, {"data": [1]}, {"data": [{}]}, "x"])
def test_a_server_that_lists_no_models_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: object
) -> None:
    serve(monkeypatch, answer)
    with pytest.raises(ServerError, match="is no server of OpenAI's API"):
        ServerModel("http://localhost", uds=str(tmp_path / "socket"))


def test_a_model_is_found_by_its_name_or_its_root(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(monkeypatch, {"data": [{"id": "a", "root": "org/a"}, {"id": "b"}]})
    socket = str(tmp_path / "socket")
    for name, expected in ((None, "a"), ("org/a", "a"), ("b", "b")):
        model = ServerModel("http://localhost", uds=socket, model=name)
        assert model.model_name == expected
        model.close()
    with pytest.raises(UsageError, match="does not serve c") as caught:
        ServerModel("http://localhost", uds=socket, model="c")
    assert caught.value.hint == "It has a, b."
