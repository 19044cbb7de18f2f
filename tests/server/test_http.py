"""What every endpoint shares: keys, ids, errors, limits, queue, models, tokens, metrics."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from nvcli.server import json_io
from nvcli.server import state as state_module
from nvcli.server.config import ServerConfig
from nvcli.server.errors import NotReadyError
from nvcli.text.tokenizer import OWN_VARIABLES
from tests.server.conftest import DEFAULTS, Serve, Served, parse_events
from tests.waiting import PATIENCE_S, limits, until

CHAT = "/v1/chat/completions"


def check_error(response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 8192
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    if code is not None:
        assert error["code"] == code
    return error


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve("Hello!")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b"[]",
        b"null",
        b"123",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "scripted", "messages": NaN}',
        b"[" * 5000,
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b'{"model": "scripted", "messages": []}',
        b'{"model": "scripted"}',
        b'{"model": 5, "messages": [{"role":"user","content":"x"}]}',
        b'{"model": "scripted", "messages": [{"role":"user"}], "seed": 1' + b"0" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_request_is_a_400(served: Served, body: bytes) -> None:
    response = served.post_text(CHAT, body)
    check_error(response, 400)
    assert served.chat()["choices"][0]["message"]["content"] == "Hello!"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"299999": 1}}, "logit_bias"),
        ({"stop_token_ids": [300], "min_tokens": 1}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"documents": [{}]}, "documents"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"chat_template": "x"}, "chat_template"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"enable_thinking": True, "thinking": False}, "thinking"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        *(
            ({"chat_template_kwargs": {name: []}}, f"chat_template_kwargs.{name}")
            for name in sorted(OWN_VARIABLES)
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "tool", "tool_call_id": "nope", "content": "x"}]},
            "messages[0].tool_call_id",
        ),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    error = check_error(served.post(CHAT, {**DEFAULTS, **fields}), 400)
    assert error["param"] == param


def test_a_variable_of_a_template_may_have_any_other_name(served: Served) -> None:
    kwargs = {"self": 1, "args": 2, "": 3, "a b": 4, "source": 5, "variables": 6}
    served.chat(chat_template_kwargs=kwargs)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limit", [10**9, 2**63, 10**30])
def test_a_huge_limit_is_the_room_there_is(served: Served, name: str, limit: int) -> None:
    body = json.dumps({**DEFAULTS, name: limit})
    response = served.post_text(CHAT, body)
    assert response.status_code == 200, response.text


def test_an_error_is_bounded(served: Served) -> None:
    body = {**DEFAULTS, "reasoning_effort": "x" * 100_000}
    check_error(served.post(CHAT, body), 400)
    body = {**DEFAULTS, "model": "\u4e16" * 100_000}
    check_error(served.post(CHAT, body), 404, "model_not_found")
    body = {**DEFAULTS, "messages": [{"role": "\U0001f600" * 9000, "content": ""}]}
    check_error(served.post(CHAT, body), 400)


def test_lone_surrogates_become_valid_json(served: Served) -> None:
    raw = b'{"model":"scripted","messages":[{"role":"user","content":"\\ud83d x"}]}'
    response = served.post_text(CHAT, raw)
    assert response.status_code in (200, 400)
    json.loads(response.content.decode("utf-8"))


def test_content_type_and_size(serve: Serve) -> None:
    served = serve("x", config=ServerConfig(max_body_bytes=1000))
    response = served.client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    check_error(response, 415)
    check_error(served.post(CHAT, {**DEFAULTS, "user": "x" * 2000}), 413)

    def chunks() -> Any:
        for _ in range(10):
            yield b" " * 500

    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S, trust_env=False) as client:
        check_error(client.post(CHAT, content=chunks(), headers=headers), 413)


def test_all_bodies_together_are_bounded(serve: Serve) -> None:
    """Many clients with a large body each, none of which is too large."""
    served = serve("x", config=ServerConfig(max_body_bytes=4000))
    port = int(served.url.rpartition(":")[2])
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\n"
        b"content-length: 4000\r\n\r\n"
    )
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(head + b" " * 3999)
        until(lambda: served.app.state.num_body_bytes == 16 * 3999)
        response = served.post(CHAT, DEFAULTS)
        check_error(response, 429, "queue_full")
        assert response.headers["retry-after"] == "1"
    until(lambda: served.app.state.num_body_bytes == 0)
    assert served.post(CHAT, DEFAULTS).status_code == 200
    until(lambda: served.app.state.num_body_bytes == 0)


def test_large_requests_take_turns(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small ones find a thread."""
    monkeypatch.setattr(state_module, "LARGE_REQUEST", 100_000)
    served = serve("Hello!")
    gate, num_inside = threading.Event(), 0

    def loads(data: bytes) -> Any:
        nonlocal num_inside
        if len(data) >= 100_000:
            num_inside += 1
            gate.wait(PATIENCE_S)
        return json.loads(data)

    monkeypatch.setattr(json_io, "loads", loads)
    large = {**DEFAULTS, "user": "x" * 100_000}
    with ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(served.post, CHAT, large) for _ in range(60)]
        until(lambda: served.app.state.num_requests == 60 and num_inside == 2)
        assert served.post(CHAT, {**DEFAULTS, "user": "x" * 70_000}).status_code == 200
        assert num_inside == 2
        gate.set()
        assert all(response.result().status_code == 200 for response in waiting)


def test_a_body_of_countless_lists(served: Served) -> None:
    lists = b'{"model": "scripted", "prompt": [' + b"[]," * 600_000 + b"[]]}"
    response = served.post_text("/v1/completions", lists)
    assert "over 500,000 objects and lists" in check_error(response, 400)["message"]
    text = {"model": "scripted", "prompt": "[{" * 400_000}  # in a text they are nothing
    error = check_error(served.post("/v1/completions", text), 400, "context_length_exceeded")
    assert "the first 8,192 of 800,000 characters of the prompt have" in error["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_text_that_is_much_too_long_can_be_cut(served: Served, path: str) -> None:
    text = "word " * 50_000
    body: dict[str, Any] = {"model": "scripted", "prompt": text}
    if path == CHAT:
        body = {**DEFAULTS, "messages": [{"role": "user", "content": text}]}
    check_error(served.post(path, body), 400, "context_length_exceeded")
    answer = served.ask(path, {**body, "truncate_prompt_tokens": 20, "max_tokens": 2})
    assert answer["usage"]["prompt_tokens"] == 20


def test_unknown_paths_and_methods(served: Served) -> None:
    check_error(served.client.get("/v1/nope"), 404, "not_found")
    response = served.client.put(CHAT)
    check_error(response, 405, "method_not_allowed")
    assert "POST" in response.headers["allow"]


def test_the_key_covers_all_but_live_and_health(serve: Serve) -> None:
    served = serve("x", config=ServerConfig(api_keys=("sekret", "other")))
    for path in ("/live", "/health"):
        assert served.client.get(path).status_code == 200
    for path in ("/metrics", "/v1/models", "/version", "/ping", "/nope", "/tokenizer_info"):
        response = served.client.get(path)
        check_error(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    for headers in (
        {"authorization": "Bearer sekret"},
        {"authorization": "bearer other"},
        {"x-api-key": "sekret"},
    ):
        assert served.client.get("/v1/models", headers=headers).status_code == 200
    for value in ("Bearer", "Bearer sekre", "Basic sekret", "sekret", "Bearer sekret2"):
        headers = {"authorization": value}
        assert served.client.get("/v1/models", headers=headers).status_code == 401
    assert served.client.options("/v1/models").status_code == 401


def test_open_metrics_and_no_metrics(serve: Serve) -> None:
    config = ServerConfig(api_keys=("k",), metrics="open")
    assert serve("x", config=config).client.get("/metrics").status_code == 200
    check_error(serve("x", config=ServerConfig(metrics="off")).client.get("/metrics"), 404)


def test_request_ids_are_echoed_or_made(served: Served) -> None:
    response = served.client.get("/version", headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    for bad in ("a b", "x" * 200):
        response = served.client.get("/version", headers={"x-request-id": bad})
        assert response.headers["x-request-id"].startswith("req_")
    assert int(response.headers["openai-processing-ms"]) >= 0
    error = served.client.get("/nope", headers={"x-request-id": "abc-2"})
    assert error.headers["x-request-id"] == "abc-2"


def test_unknown_fields_are_named_or_refused(serve: Serve) -> None:
    served = serve("x")
    response = served.post(CHAT, {**DEFAULTS, "zzz": 1, "b\u00e4d": 2})
    assert response.status_code == 200
    assert response.headers["x-nvcli-ignored-fields"] == "zzz,b?d"
    strict = serve("x", config=ServerConfig(is_strict=True))
    assert check_error(strict.post(CHAT, {**DEFAULTS, "zzz": 1}), 400)["param"] == "zzz"


def test_models(serve: Serve) -> None:
    served = serve("x", config=ServerConfig(served_model_names=("Qwen/Qwen3-0.6B", "alias")))
    models = served.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["Qwen/Qwen3-0.6B", "alias"]
    assert models[0]["max_model_len"] == 512
    assert served.client.get("/v1/models/Qwen/Qwen3-0.6B").json()["id"] == "Qwen/Qwen3-0.6B"
    check_error(served.client.get("/v1/models/other"), 404, "model_not_found")
    assert served.chat(model="alias")["model"] == "alias"
    check_error(served.post(CHAT, {**DEFAULTS, "model": "scripted"}), 404, "model_not_found")


def test_tokenize_and_back(served: Served) -> None:
    text = "hello \u4e16\u754c \U0001f600"
    tokens = served.post("/tokenize", {"prompt": text}).json()
    assert tokens["tokens"] == served.llm.tokenizer.encode(text)
    assert tokens["count"] == len(tokens["tokens"])
    back = served.post("/detokenize", {"tokens": tokens["tokens"]}).json()
    assert back["prompt"] == back["content"] == text
    assert served.post("/tokenize", {"content": text}).json()["tokens"] == tokens["tokens"]
    pieces = served.post("/tokenize", {"content": "hi", "with_pieces": True}).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "hi"
    chat = served.post("/tokenize", {"messages": DEFAULTS["messages"]}).json()
    usage = served.chat()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    for ids in ([-1], [300], [2**40], ["x"], [True]):
        check_error(served.post("/detokenize", {"tokens": ids}), 400)
    check_error(served.post("/tokenize", {}), 400)
    for two in ({"prompt": "a", "content": "b"}, {**DEFAULTS, "prompt": "a"}):
        error = check_error(served.post("/tokenize", two), 400)
        assert "cannot be given beside" in error["message"]


def test_a_prompt_that_does_not_fit(served: Served) -> None:
    body = {**DEFAULTS, "messages": [{"role": "user", "content": "x" * 600}]}
    error = check_error(served.post(CHAT, body), 400, "context_length_exceeded")
    assert "512" in error["message"]
    assert served.chat(max_tokens=10**9)["choices"][0]["finish_reason"] == "stop"


def test_a_full_queue_is_a_429(serve: Serve) -> None:
    served = serve("x" * 50, config=ServerConfig(max_queue=0), max_num_seqs=2)
    served.llm.device.gate.clear()
    replies: list[httpx.Response] = []
    body = {**DEFAULTS, "n": 2}
    thread = threading.Thread(target=lambda: replies.append(served.post(CHAT, body)))
    thread.start()
    until(lambda: served.app.state.is_loaded and served.app.state.bridge.num_open)
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S, trust_env=False) as client:
        response = client.post(CHAT, json=DEFAULTS)
    check_error(response, 429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1
    served.llm.device.gate.set()
    thread.join()
    assert replies[0].status_code == 200
    assert served.chat()["choices"]


def test_what_comes_after_the_end_of_the_drain_is_told(serve: Serve) -> None:
    """As the next turn of a request whose tool has let go of it."""
    served = serve("x")
    served.chat()
    served.app.state.bridge.end(NotReadyError("the server is shutting down"))
    check_error(served.post(CHAT, DEFAULTS), 503, "not_ready")


def test_loading_and_draining_are_503(serve: Serve) -> None:
    served = serve("x")
    served.chat()
    served.app.state.is_draining = True
    response = served.post(CHAT, DEFAULTS)
    check_error(response, 503, "not_ready")
    assert "retry-after" in response.headers
    check_error(served.client.get("/health"), 503)
    assert served.client.get("/live").status_code == 200


def test_a_dead_engine_is_a_503(serve: Serve) -> None:
    served = serve("x")
    served.chat()
    served.llm.close()
    check_error(served.client.get("/health"), 503)
    check_error(served.post(CHAT, DEFAULTS), 503)


def test_while_every_replica_is_lost_health_is_a_503(serve: Serve) -> None:
    """A request would wait until one is back, however long that takes."""
    served = serve("x")
    served.llm.num_up = 1
    assert served.client.get("/health").status_code == 200
    served.llm.num_up = 0
    check_error(served.client.get("/health"), 503, "not_ready")
    assert served.chat()["choices"]


def test_a_step_that_fails_is_a_500_for_its_request_only(serve: Serve) -> None:
    served = serve(
        "Hello!", fail_when=lambda plan: any(row.seq.params.seed == 7 for row in plan.rows)
    )
    check_error(served.post(CHAT, {**DEFAULTS, "seed": 7}), 500, "engine_error")
    events = served.stream(CHAT, {**DEFAULTS, "seed": 7})
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "engine_error"
    assert served.chat()["choices"][0]["message"]["content"] == "Hello!"
    served.wait_idle()


def test_a_request_that_takes_too_long_ends(serve: Serve) -> None:
    for limit in limits():
        config = ServerConfig(request_timeout=limit)
        served = serve("x" * 400, config=config, delay_s=limit / 10)  # takes 40 times as long
        check_error(served.post(CHAT, DEFAULTS), 504, "request_timeout")
        response = served.post(CHAT, {**DEFAULTS, "stream": True})
        if response.status_code == 200:  # the stream had begun
            break
        check_error(response, 504, "request_timeout")
    events = parse_events(response.text)
    assert events[-2]["error"]["code"] == "request_timeout"
    assert events[-1] == "[DONE]"
    served.wait_idle()


def test_metrics_count(served: Served) -> None:
    served.chat(n=2)
    served.client.get("/nope")
    text = served.client.get("/metrics").text
    assert 'vllm:generation_tokens_total{model_name="scripted"} 14.0' in text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="scripted"} 2.0' in text
    assert 'http_requests_total{handler="none",method="GET",status="404"} 1.0' in text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "request_prompt_tokens_bucket",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "cache_config_info",
    ):
        assert f"vllm:{name}" in text, name
        assert f"nvcli:{name}" in text, name


def test_replies_do_not_wait_for_an_ack(served: Served) -> None:
    """As they would with Nagle's algorithm, 40 ms each."""
    served.chat()
    (transport,) = served.connections()
    sock = transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_cors_only_when_asked_for(serve: Serve) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    config = ServerConfig(cors_origins=("https://a.example",), api_keys=("k",))
    served = serve("x", config=config)
    response = served.client.options(CHAT, headers=headers)
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    plain = serve("x").client.get("/version", headers=headers)
    assert "access-control-allow-origin" not in plain.headers


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({}, True),
        ({"origin": "HERE"}, True),
        ({"origin": "https://a.example"}, True),
        ({"sec-fetch-site": "same-origin", "origin": "https://proxy.example"}, True),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site", "origin": "HERE"}, False),
    ],
)
def test_other_pages_may_not_ask(serve: Serve, headers: dict[str, str], is_let_in: bool) -> None:
    """A page can send a body without a content type to any address, and needs no answer to harm."""
    served = serve("x", config=ServerConfig(cors_origins=("https://a.example",)))
    sent = {key: served.url if value == "HERE" else value for key, value in headers.items()}
    response = served.client.post(CHAT, content=json.dumps(DEFAULTS), headers=sent)
    if is_let_in:
        assert response.status_code == 200, response.text
    else:
        check_error(response, 403, "origin_not_allowed")
    assert served.client.get("/v1/models", headers=sent).status_code == 200


def test_a_key_lets_any_origin_in(serve: Serve) -> None:
    served = serve("x", config=ServerConfig(api_keys=("k",)))
    headers = {"origin": "https://b.example", "x-api-key": "k"}
    assert served.client.post(CHAT, json=DEFAULTS, headers=headers).status_code == 200


def test_a_compressed_body_is_refused(served: Served) -> None:
    body = gzip.compress(json.dumps(DEFAULTS).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    check_error(served.client.post(CHAT, content=body, headers=headers), 415)


def test_a_wrong_method_is_told_the_right_ones(served: Served) -> None:
    for path, methods in (
        (CHAT, "GET, HEAD, POST"),
        (f"{CHAT}/x", "DELETE, GET, HEAD, POST"),
        ("/v1/responses", "POST"),
        ("/v1/responses/x", "DELETE, GET, HEAD"),
    ):
        response = served.client.put(path)
        check_error(response, 405, "method_not_allowed")
        assert response.headers["allow"] == methods


def test_tokenize_names_ignored_fields_of_chats_too(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {**DEFAULTS, "tools": tools, "return_token_strs": True, "zzz": 1}
    response = served.post("/tokenize", chat)
    assert response.status_code == 200, response.text
    assert response.headers["x-nvcli-ignored-fields"] == "zzz"


def test_parts_of_stored_messages(served: Served) -> None:
    parts = [{"type": "text", "text": "hi"}]
    stored = served.chat(store=True, messages=[{"role": "user", "content": parts}])
    (message,) = served.client.get(f"{CHAT}/{stored['id']}/messages").json()["data"]
    assert (message["content"], message["content_parts"]) == (None, parts)


def test_stored_completions(serve: Serve) -> None:
    served = serve("Hello!", config=ServerConfig(store_limit=3))
    ids = [served.chat(store=True, metadata={"k": str(i)})["id"] for i in range(4)]
    served.chat_stream(store=True, metadata={"k": "s"})
    listed = served.client.get(CHAT).json()
    assert [item["id"] for item in listed["data"]][:2] == ids[2:]
    assert len(listed["data"]) == 3
    found = served.client.get(CHAT, params={"metadata[k]": "3"}).json()["data"]
    assert [item["id"] for item in found] == [ids[3]]
    one = served.client.get(f"{CHAT}/{ids[3]}").json()
    assert one["choices"][0]["message"]["content"] == "Hello!"
    streamed = listed["data"][-1]
    assert streamed["choices"] == one["choices"]
    messages = served.client.get(f"{CHAT}/{ids[3]}/messages").json()["data"]
    assert messages[0]["content"] == "hi"
    changed = served.post(f"{CHAT}/{ids[3]}", {"metadata": {"z": "1"}}).json()
    assert changed["metadata"] == {"z": "1"}
    assert served.client.delete(f"{CHAT}/{ids[3]}").json()["deleted"] is True
    check_error(served.client.get(f"{CHAT}/{ids[3]}"), 404)
    check_error(served.client.get(CHAT, params={"limit": "0"}), 400)
