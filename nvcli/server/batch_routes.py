"""The endpoints of `/v1/batches`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from nvcli.protocol.chat import read_metadata
from nvcli.protocol.fields import Fields
from nvcli.server.batches import ENDPOINTS
from nvcli.server.errors import NotFoundError
from nvcli.server.files import files_of
from nvcli.server.front import ignore_fields
from nvcli.server.json_io import JSONBody, read_object
from nvcli.server.store import page_of

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response

    from nvcli.server.batch_object import Batch
    from nvcli.server.batches import BatchManager
    from nvcli.server.state import ServerState


def _manager(state: ServerState) -> BatchManager:
    files_of(state)
    assert state.batches is not None, "batches come with files"
    return state.batches


def _batch(state: ServerState, http: HTTPRequest) -> Batch:
    batch_id = http.path_params["batch_id"]
    batch = _manager(state).get(batch_id)
    if batch is None:
        raise NotFoundError(f"there is no batch {batch_id[:100]!r}", param="batch_id")
    return batch


async def create_batch(state: ServerState, http: HTTPRequest) -> Response:
    manager = _manager(state)
    state.check_accepting()
    fields = Fields(await read_object(http))
    file_id = fields.text("input_file_id")
    if file_id is None:
        fields.fail("input_file_id", "is missing")
    if files_of(state).get(file_id, "input_file_id")["purpose"] != "batch":
        fields.fail("input_file_id", "is no file with purpose batch")
    endpoint = fields.text("endpoint")
    if endpoint not in ENDPOINTS:
        fields.fail("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    window = fields.choice("completion_window", ("24h",))
    if window is None:
        fields.fail("completion_window", "is missing; it is 24h")
    if fields.get("output_expires_after") is not None:
        fields.refuse("output_expires_after", "is not supported; output files stay")
    metadata = read_metadata(fields)
    ignore_fields(http.scope, fields.unknown(is_strict=state.config.is_strict))
    batch = await run_in_threadpool(manager.create, file_id, endpoint, window, metadata)
    return JSONBody(batch)


async def list_batches(state: ServerState, http: HTTPRequest) -> Response:
    manager = _manager(state)
    return JSONBody(page_of(manager.all(), http, default_order="desc"))


async def get_batch(state: ServerState, http: HTTPRequest) -> Response:
    return JSONBody(_batch(state, http))


async def cancel_batch(state: ServerState, http: HTTPRequest) -> Response:
    batch = _batch(state, http)
    manager = _manager(state)
    return JSONBody(await run_in_threadpool(manager.cancel, batch["id"]))
