"""docs/server.md names every request field the code knows, and no other; and every route."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvcli.protocol import parse_chat, parse_completion
from nvcli.protocol.fields import Fields
from nvcli.protocol.messages import parse_messages_request
from nvcli.protocol.pooling import parse_embedding, parse_rerank
from nvcli.protocol.responses import parse_responses
from nvcli.server.app import routes

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
USER = [{"role": "user", "content": "x"}]

PARSERS: dict[str, Callable[[], Any]] = {
    "chat completions": lambda: parse_chat({"messages": USER}),
    "completions": lambda: parse_completion({"prompt": "x"}),
    "responses": lambda: parse_responses({"input": "x"}),
    "messages": lambda: parse_messages_request({"messages": USER, "max_tokens": 1}),
    "embeddings": lambda: parse_embedding({"input": "x"}, hidden_size=64),
    "rerank": lambda: parse_rerank(
        {"query": "x", "documents": ["y"]}, is_strict=False, returns_documents=False
    ),
}


def section(title: str) -> str:
    return PAGE.read_text("utf-8").split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", PARSERS)
def test_the_page_lists_the_fields(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known: set[str] = set()
    unknown = Fields.unknown

    def watch(self: Fields, **options: Any) -> tuple[str, ...]:
        if not self._place:
            known.update(self._known)
        return unknown(self, **options)

    monkeypatch.setattr(Fields, "unknown", watch)
    PARSERS[name]()
    listed: list[str] = []
    for row in section(f"Fields of {name}").splitlines():
        if row.startswith("| `"):
            listed += re.findall(r"`([a-z_]+)`", row.split("|")[1])
    assert len(listed) == len(set(listed))
    assert set(listed) == known


def test_the_page_lists_the_routes() -> None:
    text = section("Endpoints")
    for route in routes():
        parts = [part for part in route.path.split("/") if part and not part.startswith("{")]
        head = "/" + "/".join(parts[:2] if parts[0].startswith("v") else parts[:1])
        assert head in text, route.path
        for part in parts[2:]:
            assert part in text or part == "content", route.path
