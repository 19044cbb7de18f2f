"""Which names a server without a key answers to."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from nvcli.errors import UsageError
from nvcli.server.app import create_app
from nvcli.server.config import ServerConfig
from tests.server.conftest import DEFAULTS, Serve, Served
from tests.waiting import PATIENCE_S

CHAT = "/v1/chat/completions"


def get(served: Served, path: str, lines: str) -> tuple[int, dict[str, Any] | None]:
    """The status and the error, on the wire: clients would not send these heads."""
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(f"GET {path} HTTP/1.0\r\n{lines}\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    status = int(answer.split()[1])
    body = answer.partition(b"\r\n\r\n")[2]
    return status, None if status == 200 else json.loads(body)["error"]


@pytest.mark.parametrize(
    ("host", "bound", "is_let_in"),
    [
        ("localhost", "127.0.0.1", True),
        ("LocalHost.:9000", "127.0.0.1", True),
        ("a.localhost:80", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.1:8000", "127.0.0.1", True),
        ("[::1]:8000", "127.0.0.1", True),
        ("192.168.1.7:8000", "0.0.0.0", True),
        ("", "127.0.0.1", True),
        (None, "127.0.0.1", True),
        ("Allowed.Example.:8000", "127.0.0.1", True),
        ("one.below.example", "127.0.0.1", True),
        ("gpu7", "gpu7", True),
        ("gpu7", "0.0.0.0", True),
        ("nvcli.default.svc.cluster.local:8000", "::", True),
        ("gpu7", "127.0.0.1", False),
        ("printer.local", "127.0.0.2", False),
        ("evil.example", "127.0.0.1", False),
        ("evil.example:8000", "0.0.0.0", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("evil-localhost", "127.0.0.1", False),
        ("below.example", "127.0.0.1", False),
        ("xallowed.example", "127.0.0.1", False),
        ("localhost..", "127.0.0.1", False),
        ("localhost:80:80", "127.0.0.1", False),
        ("localhost@evil.example", "127.0.0.1", False),
        ("[::1].evil.example", "127.0.0.1", False),
        ("evil.example, localhost", "127.0.0.1", False),
    ],
)
def test_names_that_may_be_bent_are_refused(
    serve: Serve, host: str | None, bound: str, is_let_in: bool
) -> None:
    """DNS rebinding: a page's own name points here, and its requests seem to be of one origin."""
    config = ServerConfig(host=bound, allowed_hosts=("allowed.example", "*.below.example"))
    served = serve("x", config=config)
    line = "" if host is None else f"host: {host}\r\n"
    for path in ("/live", "/health"):
        assert get(served, path, line) == (200, None)
    for path in ("/v1/models", "/metrics", "/nowhere"):
        status, error = get(served, path, line)
        if is_let_in:
            assert status == (404 if path == "/nowhere" else 200)
        else:
            assert status == 403
            assert error is not None
            assert (error["code"], error["type"]) == ("host_not_allowed", "permission_error")
            assert "--allowed-host" in error["message"]


def test_the_second_name_of_a_request_counts_too(serve: Serve) -> None:
    lines = "host: localhost\r\nhost: evil.example\r\n"
    assert get(serve("x"), "/v1/models", lines)[0] == 403


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost/v1/models", 200),
        ("HTTP://LocalHost.:8000/v1/models?limit=1", 200),
        ("http://[::1]:8000/v1/models", 200),
        ("http://localhost", 404),
        ("http://localhost?a=1", 404),
        ("http://evil.example/v1/models", 403),
        ("http://evil.example:8000/v1/models", 403),
        ("http://evil.example", 403),
        ("http://localhost@evil.example/v1/models", 403),
        ("http://evil.example/live", 200),
    ],
)
def test_the_name_in_a_target_that_is_a_whole_url_counts_too(
    serve: Serve, target: str, status: int
) -> None:
    assert get(serve("x"), target, "host: localhost\r\n")[0] == status


def test_a_target_that_is_a_whole_url_lets_no_other_host_in(serve: Serve) -> None:
    assert get(serve("x"), "http://localhost/v1/models", "host: evil.example\r\n")[0] == 403


def test_blanks_around_a_header_are_no_part_of_it(serve: Serve) -> None:
    lines = "host: \t localhost \t \r\n"
    served = serve("x")
    assert get(served, "/v1/models", lines)[0] == 200
    assert get(served, "/v1/models", "host: local host \r\n")[0] == 403
    served = serve("x", config=ServerConfig(api_keys=("k",)))
    assert get(served, "/v1/models", "x-api-key: k \t\r\n")[0] == 200


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig(api_keys=("k",)),
        ServerConfig(allowed_hosts=("*",)),
        ServerConfig(cors_origins=("*",)),  # any page may ask anyway
    ],
)
def test_what_lets_any_name_in(serve: Serve, config: ServerConfig) -> None:
    headers = {"host": "any.example", "x-api-key": "k", "origin": "http://any.example"}
    response = serve("x", config=config).client.post(CHAT, json=DEFAULTS, headers=headers)
    assert response.status_code == 200, response.text


def test_metrics_that_are_open_are_so_under_any_name(serve: Serve) -> None:
    served = serve("x", config=ServerConfig(metrics="open"))
    headers = {"host": "prometheus.example"}
    assert served.client.get("/metrics", headers=headers).status_code == 200
    assert served.client.get("/version", headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *(
            (name, "allowed_host takes a host name")
            for name in ("a.example:80", "http://a.example", "a b", "*.", "a.*.b")
        ),
        ("", "allowed_host is empty"),
    ],
)
def test_a_name_that_can_be_none_is_refused(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        create_app(ServerConfig(allowed_hosts=(name,)))
    assert caught.value.param == "allowed_host"
