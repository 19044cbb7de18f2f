"""Endpoints about the server itself: models, health, version, metrics."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from nvcli import __version__
from nvcli.server.errors import NotFoundError, NotReadyError
from nvcli.server.json_io import JSONBody
from nvcli.server.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest

    from nvcli.server.state import ServerState

_SHOWN = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty")


def _model(state: ServerState, name: str) -> dict[str, Any]:
    llm = state.llm
    defaults = {}
    for mode, thinks in (("thinking", True), ("plain", False)):
        if thinks and not llm.supports_thinking:
            continue
        params = asdict(llm.sampling(enable_thinking=thinks))
        defaults[mode] = {key: params[key] for key in _SHOWN}
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "nvcli",
        "type": "model",  # from here to max_tokens: what Anthropic's clients read
        "display_name": name,
        "created_at": datetime.fromtimestamp(state.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": llm.max_model_len,
        "max_tokens": llm.max_model_len,
        "root": llm.model_name,
        "parent": None,
        "max_model_len": llm.max_model_len,
        "max_num_seqs": llm.max_num_seqs,
        "modalities": ["text"],
        "supports_thinking": llm.supports_thinking,
        "default_sampling": defaults,
    }


async def list_models(state: ServerState, http: HTTPRequest) -> Response:
    data = [_model(state, name) for name in state.model_names]
    shape = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    return JSONBody({"object": "list", "data": data, **shape})


async def get_model(state: ServerState, http: HTTPRequest) -> Response:
    return JSONBody(_model(state, state.check_model(http.path_params["model"])))


async def live(state: ServerState, http: HTTPRequest) -> Response:
    """The process answers."""
    return JSONBody({"status": "ok"})


async def health(state: ServerState, http: HTTPRequest) -> Response:
    """Requests are answered. Raises `NotReadyError` otherwise."""
    state.check_accepting()
    if getattr(state.llm, "num_up", 1) == 0:  # of replicas; requests wait for one to come back
        raise NotReadyError("every replica is lost", hint="Ray starts them where it has room.")
    return JSONBody({"status": "ok"})


async def version(state: ServerState, http: HTTPRequest) -> Response:
    return JSONBody({"version": __version__})


async def metrics(state: ServerState, http: HTTPRequest) -> Response:
    if state.config.metrics == "off":
        raise NotFoundError("metrics are off", hint="Start the server with --metrics key or open.")
    return Response(state.metrics.render(), media_type=None, headers={"content-type": CONTENT_TYPE})
