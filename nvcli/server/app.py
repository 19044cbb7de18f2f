"""The ASGI app: which path goes where, and the layers around it.

CORS (with --cors-origin) > Front (id, key, limits, errors, counts) > Router > endpoint
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Match, Route, Router

from nvcli.server import (
    about,
    batch_routes,
    chat,
    completions,
    files,
    messages,
    pooling,
    responses,
    tokens,
)
from nvcli.server.front import Front
from nvcli.server.state import ServerState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from nvcli.server.config import ServerConfig
    from nvcli.server.engine import ServerEngine

    Endpoint = Callable[[ServerState, Request], Awaitable[ASGIApp]]


def _route(methods: str, path: str, endpoint: Endpoint) -> Route:
    """The metrics know a request by its route, not by its path, so that there are few of them."""
    return Route(path, _Labelled(path.replace(":path", ""), endpoint), methods=methods.split())


class _Labelled:
    """Starlette calls an object that is no function as an ASGI app."""

    def __init__(self, label: str, endpoint: Endpoint) -> None:
        self._label = label
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["handler"] = self._label
        response = await self._endpoint(scope["app"].state, Request(scope, receive, send))
        await response(scope, receive, send)


def routes() -> list[Route]:
    """Every endpoint there is; one more module is one more block here."""
    stored = "/v1/chat/completions/{completion_id}"
    return [
        _route("POST", "/v1/chat/completions", chat.create_chat_completion),
        _route("GET", "/v1/chat/completions", chat.list_chat_completions),
        _route("GET", stored, chat.get_chat_completion),
        _route("POST", stored, chat.update_chat_completion),
        _route("DELETE", stored, chat.delete_chat_completion),
        _route("GET", f"{stored}/messages", chat.list_chat_messages),
        _route("POST", "/v1/completions", completions.create_completion),
        _route("POST", "/v1/responses", responses.create_response),
        _route("POST", "/v1/responses/input_tokens", responses.count_input_tokens),
        _route("POST", "/v1/responses/compact", responses.compact),
        _route("GET", "/v1/responses/{response_id}", responses.get_response),
        _route("DELETE", "/v1/responses/{response_id}", responses.delete_response),
        _route("POST", "/v1/responses/{response_id}/cancel", responses.cancel_response),
        _route("GET", "/v1/responses/{response_id}/input_items", responses.list_input_items),
        _route("POST", "/v1/messages", messages.create_message),
        _route("POST", "/v1/messages/count_tokens", messages.count_tokens),
        _route("POST", "/v1/embeddings", pooling.create_embeddings),
        *[_route("POST", f"{prefix}/rerank", pooling.rerank) for prefix in ("", "/v1", "/v2")],
        *[_route("POST", f"{prefix}/score", pooling.score) for prefix in ("", "/v1")],
        _route("POST", "/v1/files", files.upload_file),
        _route("GET", "/v1/files", files.list_files),
        _route("GET", "/v1/files/{file_id}", files.get_file),
        _route("DELETE", "/v1/files/{file_id}", files.delete_file),
        _route("GET", "/v1/files/{file_id}/content", files.get_file_content),
        _route("POST", "/v1/batches", batch_routes.create_batch),
        _route("GET", "/v1/batches", batch_routes.list_batches),
        _route("GET", "/v1/batches/{batch_id}", batch_routes.get_batch),
        _route("POST", "/v1/batches/{batch_id}/cancel", batch_routes.cancel_batch),
        _route("POST", "/tokenize", tokens.tokenize),
        _route("POST", "/detokenize", tokens.detokenize),
        _route("GET", "/tokenizer_info", tokens.tokenizer_info),
        _route("GET", "/v1/models", about.list_models),
        _route("GET", "/v1/models/{model:path}", about.get_model),
        _route("GET", "/live", about.live),
        _route("GET", "/health", about.health),
        _route("GET POST", "/ping", about.health),
        _route("GET", "/version", about.version),
        _route("GET", "/metrics", about.metrics),
    ]


class App:
    """What uvicorn runs. `state` belongs to it; `llm` may come later, through `state.attach`."""

    def __init__(self, config: ServerConfig, llm: ServerEngine | None, table: Sequence[Route]):
        self.state = ServerState(config)
        self._llm = llm
        app: ASGIApp = Front(_Routed(table, self), self.state)
        if config.cors_origins:
            app = CORSMiddleware(
                app,
                allow_origins=config.cors_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "retry-after", "x-nvcli-ignored-fields"),
            )
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._llm is not None:  # the bridge belongs to the running event loop
            self.state.attach(self._llm)
            self._llm = None
        await self._app(scope, receive, send)


class _Routed:
    """The router; with an app in the scope it raises for an unknown path and a wrong method."""

    def __init__(self, table: Sequence[Route], app: App) -> None:
        self._table = table
        self._router = Router(list(table), redirect_slashes=False)
        self._owner = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self._owner
        try:
            await self._router(scope, receive, send)
        except HTTPException as exc:
            if exc.status_code != 405:
                raise
            # The router names the methods of the first route of the path only.
            methods = {
                method
                for route in self._table
                if route.matches(scope)[0] is not Match.NONE
                for method in route.methods or ()
            }
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(methods))}) from None


def create_app(config: ServerConfig, llm: ServerEngine | None = None) -> App:
    """The server as an ASGI app. Without `llm` it answers 503 until `state.attach`."""
    return App(config, llm, routes())
