"""Clients that mean harm, on the wire: no HTTP, endless heads, slow requests, and every field of
every endpoint with values of every wrong kind."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from nvcli.server.config import ServerConfig
from nvcli.server.http_protocol import GuardedProtocol
from tests.server.conftest import DEFAULTS, Serve, Served
from tests.waiting import PATIENCE_S, limits

CHAT = "/v1/chat/completions"
HEAD = b"host: localhost\r\nconnection: close\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"content-type: application/json\r\n"


def connect(served: Served) -> socket.socket:
    port = int(served.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def send(served: Served, data: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    answer = b""
    with connect(served) as sock:
        try:
            sock.sendall(data)
            while piece := sock.recv(1 << 16):
                answer += piece
        except ConnectionError:
            pass
    return answer


def check_good(served: Served) -> None:
    assert served.chat()["choices"][0]["message"]["content"] == "Hello!"


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve("Hello!")


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (bytes(range(256)) + b"\r\n\r\n", (400,)),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
        (b"GET /\xff HTTP/1.1\r\n" + HEAD + b"\r\n", (400,)),
        (b"GET /%ff%00%2e%2e/ HTTP/1.1\r\n" + HEAD + b"\r\n", (404,)),
        (b"CONNECT evil:443 HTTP/1.1\r\n" + HEAD + b"\r\n", (400, 404, 405)),
        (b"OPTIONS * HTTP/1.1\r\n" + HEAD + b"\r\n", (404, 405)),
        (
            b"GET /v1/responses/x?stream=1&starting_after=%D9%A3 HTTP/1.1\r\n" + HEAD + b"\r\n",
            (400,),
        ),
        (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ", (400,)),
        (POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", (400,)),
        (POST + b"content-length: -1\r\n\r\n{}", (400,)),
        (POST + b"content-length: 99999999999999999999999\r\n\r\n{}", (400,)),
        (POST + b"content-length: 99999999\r\n\r\n{}", (413,)),
        (POST + b"transfer-encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n", (400,)),
        (POST + b"transfer-encoding: gzip\r\n\r\n{}", (400,)),
        (b"GET /live HTTP/1.1\r\nx-request-id: a\0b\r\n" + HEAD + b"\r\n", (400,)),
        (b"GET /live HTTP/1.1\r\n" + HEAD + b"x: " + b"a" * 100_000 + b"\r\n\r\n", (431,)),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + HEAD + b"\r\n", (431,)),
        (b"GET /live HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + HEAD + b"\r\n", (431,)),
    ],
)
def test_what_is_no_request(served: Served, data: bytes, statuses: tuple[int, ...]) -> None:
    answer = send(served, data)
    if answer:  # a refusal may be lost where the server closes before it has read everything
        assert int(answer.split()[1]) in statuses, answer[:300]
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert set(error) == {"message", "type", "param", "code"}
    else:
        assert 431 in statuses
    check_good(served)


def test_a_long_body_is_no_long_head(served: Served) -> None:
    """Head and body may come in one piece."""
    body = json.dumps({**DEFAULTS, "user": "x" * 200_000}).encode()
    answer = send(served, POST + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert b"Hello!" in answer


def test_requests_in_a_row_on_one_connection(served: Served) -> None:
    data = (
        b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200
        + b"GET /live HTTP/1.1\r\n"
        + HEAD
        + b"\r\n"
    )
    assert send(served, data).count(b"HTTP/1.1 200") == 201


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize(
    "around",
    [
        b"0\r\nx: " + b"y" * 1_000_000,
        b"0\r\n" + b"x: y\r\n" * 200_000,
        b"1;" + b"y" * 1_000_000,
        b"1;" + b"y" * 100 + b"\r\nx\r\n" + (b"1;" + b"y" * 100 + b"\r\nx\r\n") * 10_000,
    ],
    ids=["long trailer", "many trailers", "long extension", "many extensions"],
)
def test_what_stands_around_a_body_is_bounded(served: Served, around: bytes) -> None:
    """Nothing but time bounded it, and trailers were kept."""
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    with connect(served) as sock:
        try:
            sock.sendall(head + chunk(b" "))
            for start in range(0, len(around), 50_000):
                sock.sendall(around[start : start + 50_000])
            answer = sock.recv(1 << 16)
        except ConnectionError:  # it did not read so far
            answer = b"HTTP/1.1 431 "
    assert answer.startswith(b"HTTP/1.1 431 "), answer[:300]
    check_good(served)


def test_a_body_in_single_bytes_and_trailers(served: Served) -> None:
    """Trailers that keep within their bounds are no headers of the request."""
    text = json.dumps({**DEFAULTS, "user": "x" * 50_000})
    body = b"".join(chunk(byte.encode()) for byte in text)
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    answer = send(served, head + body + b"0\r\nx-request-id: of-a-trailer\r\n\r\n")
    assert b"Hello!" in answer
    assert b"of-a-trailer" not in answer


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("is_one_piece", [False, True])
def test_an_offer_of_another_protocol_is_passed_over(
    served: Served, is_chunked: bool, is_one_piece: bool
) -> None:
    """As Java's client and `curl --http2` make it, with a body, and with requests behind it."""
    body = json.dumps(DEFAULTS).encode()
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + offer
    head += b"content-type: application/json\r\n"
    if is_chunked:
        head += b"transfer-encoding: chunked\r\n\r\n"
        body = chunk(body[:9]) + chunk(body[9:]) + b"0\r\n\r\n"
    else:
        head += b"content-length: %d\r\n\r\n" % len(body)
    last = b"GET /version HTTP/1.1\r\n" + offer.replace(b"Upgrade,", b"close, Upgrade,")
    last += b"host: localhost\r\n\r\n"
    pieces = [head, body, head, body[:20], body[20:], last]
    answer = b""
    with connect(served) as sock:
        for piece in [b"".join(pieces)] if is_one_piece else pieces:
            sock.sendall(piece)
            time.sleep(0.01)  # a read of its own for each
        while piece := sock.recv(1 << 16):
            answer += piece
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1") == 3, answer
    assert answer.count(b"Hello!") == 2


def test_an_offer_and_a_body_without_an_end(served: Served) -> None:
    offer = b"connection: upgrade\r\nupgrade: websocket\r\n"
    head = (POST + offer).replace(b"connection: close\r\n", b"")
    for rest in (
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
    ):
        answer = send(served, head + rest)
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert b"this is no HTTP request" in answer
    check_good(served)


def test_a_request_in_line_may_be_slow_and_bad(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it stands between the parts of the reply before it."""
    monkeypatch.setattr(GuardedProtocol, "arrival_s", 0.05)
    served = serve("x" * 40, delay_s=0.05)
    body = json.dumps({**DEFAULTS, "stream": True, "max_tokens": 20}).encode()
    first = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    first += b"content-type: application/json\r\n"
    first += b"content-length: %d\r\n\r\n" % len(body) + body
    for rest in (POST + b"content-length: 9\r\n\r\n{", b"GET /li"):
        answer = send(served, first + rest)
        whole, end, after = answer.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert end, answer[-300:]
        assert b"HTTP/1.1" not in whole[10:]
        assert after.startswith(b"HTTP/1.1 408 "), after  # once its own time has come
    answer = send(served, first + POST + b"transfer-encoding: chunked\r\n\r\nZZ\r\n")
    assert b"HTTP/1.1" not in answer[10:]
    served.wait_idle()


def test_slow_requests_are_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "arrival_s", 0.3)
    served = serve("Hello!")
    for data in (b"", b"POST /v1/chat", POST, POST + b"content-length: 100\r\n\r\n{", b"GET /li"):
        with connect(served) as sock:
            sock.sendall(data)
            answer = sock.recv(1 << 16)
            assert b" 408 " in answer.split(b"\r\n")[0], (data, answer)
    # Drops of a body do not help: it would take hours.
    with connect(served) as sock:
        sock.sendall(POST + b"content-length: 1000000\r\n\r\n")
        with pytest.raises(ConnectionError):
            drop_by_drop(sock)
    # A reply may take as long as it wants.
    for limit in limits():
        monkeypatch.setattr(GuardedProtocol, "arrival_s", limit)
        response = serve("Hello!", delay_s=limit / 4).post(CHAT, DEFAULTS)
        if response.status_code != 408:  # it arrived in time
            break
    assert response.json()["choices"][0]["message"]["content"] == "Hello!"


def drop_by_drop(sock: socket.socket) -> None:
    while True:
        sock.sendall(b" ")
        time.sleep(0.05)


# --- values of every wrong kind ------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
SECTIONS = {
    "chat completions": (CHAT, DEFAULTS),
    "completions": ("/v1/completions", {"model": "scripted", "prompt": "hi"}),
    "responses": ("/v1/responses", {"model": "scripted", "input": "hi"}),
    "messages": ("/v1/messages", {**DEFAULTS, "max_tokens": 4}),
    "embeddings": ("/v1/embeddings", {"model": "scripted", "input": "hi"}),
    "rerank": ("/rerank", {"query": "a", "documents": ["b"]}),
}
DEEP: Any = "x"
for _ in range(100):
    DEEP = {"properties": {"a": DEEP}, "type": "object"}
VALUES: list[Any] = [
    True,
    0,
    -1,
    2**31,
    2**63,
    1.5,
    1e308,
    "",
    "x",
    "\x00",
    "\U0001f600" * 50,
    [],
    [None],
    [[]],
    [{}],
    ["x"] * 20,
    [2**40],
    {},
    {"x": None},
    {"type": "x"},
    {"type": None, "name": [], "format": {"type": "json_schema", "schema": DEEP}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}},
    {"type": "function", "function": {"name": 5}},
    [{"type": "function", "function": {"name": "f", "parameters": DEEP}}],
    [{"type": "function", "name": "f", "parameters": {"type": ["object", 5]}}],
    [{"name": "f", "input_schema": DEEP}],
    DEEP,
]


def fields_of(section: str) -> list[str]:
    text = PAGE.read_text("utf-8").partition(f"## Fields of {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def try_fields(served: Served, section: str, every: int) -> None:
    """Each field with each value, or with each `every`-th: never a 5xx, always an error object."""
    path, good = SECTIONS[section]
    names = fields_of(section)
    assert len(names) > 5
    pairs = [(name, value) for name in names for value in VALUES]
    for name, value in pairs[::every]:
        body = {**good, name: value}
        response = served.post_text(path, json.dumps(body))
        told = (path, name, str(value)[:100], response.text[:300])
        assert response.status_code in (200, 400, 404), told
        if response.status_code != 200:
            assert len(response.content) < 8192, told
            assert isinstance(response.json()["error"], dict), told
    served.wait_idle()
    assert served.chat()["choices"][0]["message"]["content"] == "Hello!"


@pytest.mark.parametrize("section", SECTIONS)
def test_fields_with_wrong_values(served: Served, section: str) -> None:
    try_fields(served, section, 7)


@pytest.mark.soak
@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_with_every_wrong_value(served: Served, section: str) -> None:
    try_fields(served, section, 1)


def test_the_key_cannot_be_walked_around(serve: Serve) -> None:
    served = serve("Hello!", config=ServerConfig(api_keys=("k",), cors_origins=("*",)))
    for path in (
        b"//live",
        b"/live/",
        b"/live/../v1/models",
        b"/v1/models/../../live",
        b"/%2e/live",
    ):
        answer = send(served, b"GET " + path + b" HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert answer.split()[1] in (b"401", b"404"), (path, answer[:200])
        assert b"scripted" not in answer
    options = b"OPTIONS /v1/models HTTP/1.1\r\n" + HEAD + b"\r\n"
    assert b"scripted" not in send(served, options)
    for header in (b"authorization: Bearer \xff", b"authorization: Bearer k k", b"x-api-key: K"):
        answer = send(served, b"GET /v1/models HTTP/1.1\r\n" + header + b"\r\n" + HEAD + b"\r\n")
        assert answer.split()[1] == b"401", answer[:200]
