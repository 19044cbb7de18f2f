"""`/v1/files`: uploads for batches and what batches write, kept in the storage folder.

    files/ID        the bytes
    files/ID.json   the file object

A file is there once its object is: that is written last, and whole.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse

from nvcli.errors import InvalidParameterError, UsageError
from nvcli.paths import write_whole
from nvcli.protocol.fields import UnsupportedFieldError
from nvcli.server.errors import BadRequestError, MediaTypeError, NotFoundError
from nvcli.server.json_io import JSONBody
from nvcli.server.store import page_of

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response

    from nvcli.server.state import ServerState

MAX_PAGE = 10_000  # OpenAI's, of this list
_ID = re.compile(r"file-[0-9a-f]{24}")


def new_id(prefix: str) -> str:
    """With 24 hexadecimal digits, of which the first 16 are the moment in nanoseconds: objects of
    one second stand in the order in which they were made, also for the next server."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(4)}"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Atomically, and on the disk before it returns."""
    write_whole(path, json.dumps(value).encode(), is_synced=True)


def read_objects(folder: Path) -> list[dict[str, Any]]:
    """The objects of a folder, the oldest first; what cannot be read is left out."""
    objects = []
    for path in folder.glob("*.json"):
        try:
            value = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(value, dict) and value.get("id") == path.stem:
            objects.append(value)
    return sorted(objects, key=lambda value: (value["created_at"], value["id"]))


def make_folder(storage: Path, name: str) -> Path:
    """A folder in the storage, for this user alone. Raises `UsageError`."""
    folder = storage / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"cannot use {storage}: {error.strerror}", param="storage") from error
    return folder


def _missing(file_id: str, param: str) -> NotFoundError:
    return NotFoundError(f"there is no file {file_id[:100]!r}", param=param)


class FileStore:
    """Raises `UsageError` when the folder cannot be used."""

    def __init__(self, storage: Path) -> None:
        self.folder = make_folder(storage, "files")

    def path(self, file_id: str) -> Path:
        return self.folder / file_id

    def add(self, data: bytes | Path, filename: str, purpose: str) -> dict[str, Any]:
        """Keep bytes, or move a finished file in; -> its object."""
        file_id = new_id("file-")
        path = self.path(file_id)
        if isinstance(data, bytes):
            path.write_bytes(data)
        else:
            data.replace(path)
        value = {
            "id": file_id,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        write_json(self._meta(file_id), value)
        return value

    def get(self, file_id: str, param: str = "file_id") -> dict[str, Any]:
        """Raises `NotFoundError`."""
        try:
            if _ID.fullmatch(file_id) is None:
                raise FileNotFoundError
            value: dict[str, Any] = json.loads(self._meta(file_id).read_bytes())
        except (OSError, ValueError):
            raise _missing(file_id, param) from None
        return value

    def find(self, file_id: str) -> tuple[Path, os.stat_result]:
        """Where its bytes are. Raises `NotFoundError`, also where only its object is left."""
        self.get(file_id)
        try:
            return self.path(file_id), self.path(file_id).stat()
        except OSError:
            raise _missing(file_id, "file_id") from None

    def delete(self, file_id: str) -> None:
        self.get(file_id)
        self._meta(file_id).unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def _meta(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.json"


# --- multipart -----------------------------------------------------------------------------------


def parse_form(data: bytes, content_type: str) -> dict[str, tuple[str | None, bytes]]:
    """The parts of a multipart form by name: file name and bytes. Raises `BadRequestError`."""
    match = re.search(r'boundary="?([^";,]{1,200})"?', content_type)
    if match is None:
        raise BadRequestError("the form has no boundary")
    mark = b"--" + match[1].encode("latin-1")
    pieces = (b"\r\n" + data).split(b"\r\n" + mark)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise BadRequestError("the form is not complete")
    parts: dict[str, tuple[str | None, bytes]] = {}
    for piece in pieces[1:-1]:
        head, separator, body = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        text = head.decode("utf-8", "replace")
        name = _parameter("name", text)
        if not separator or not name:
            raise BadRequestError("a part of the form has no name")
        parts[name] = (_parameter("filename", text), body)
    return parts


def _parameter(name: str, head: str) -> str | None:
    """Of a part's head, in quotes or, as HTTP allows, without."""
    match = re.search(rf'[;\s]{name}=(?:"([^"]*)"|([^\s";,]+))', head, re.IGNORECASE)
    return None if match is None else match[1] if match[1] is not None else match[2]


# --- endpoints -----------------------------------------------------------------------------------


def files_of(state: ServerState) -> FileStore:
    if state.files is None:
        raise NotFoundError("this server keeps no files", hint="Start it with --storage FOLDER.")
    return state.files


async def upload_file(state: ServerState, http: HTTPRequest) -> Response:
    files = files_of(state)
    kind = http.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise MediaTypeError("the content type must be multipart/form-data")
    parts = parse_form(await http.body(), kind)
    purpose = parts.get("purpose", (None, b""))[1].decode("utf-8", "replace")
    if purpose != "batch":
        raise InvalidParameterError(f"purpose must be batch, got {purpose[:40]!r}", param="purpose")
    for name in parts:
        if name.startswith("expires_after"):
            raise UnsupportedFieldError(
                "expires_after: is not supported; files stay until they are deleted",
                param="expires_after",
            )
    if "file" not in parts:
        raise InvalidParameterError("file is missing", param="file")
    filename, data = parts["file"]
    shown = re.sub(r"[\x00-\x1f/\\]", "_", filename or "upload.jsonl")[:200]
    return JSONBody(await run_in_threadpool(files.add, data, shown, purpose))


async def list_files(state: ServerState, http: HTTPRequest) -> Response:
    files = files_of(state)
    purpose = http.query_params.get("purpose")
    found = await run_in_threadpool(read_objects, files.folder)
    items = [item for item in found if purpose is None or item["purpose"] == purpose]
    bounds = {"default_limit": MAX_PAGE, "max_limit": MAX_PAGE}
    return JSONBody(page_of(items, http, default_order="desc", **bounds))


async def get_file(state: ServerState, http: HTTPRequest) -> Response:
    return JSONBody(files_of(state).get(http.path_params["file_id"]))


async def get_file_content(state: ServerState, http: HTTPRequest) -> Response:
    files = files_of(state)
    path, found = files.find(http.path_params["file_id"])
    return FileResponse(path, media_type="application/octet-stream", stat_result=found)


async def delete_file(state: ServerState, http: HTTPRequest) -> Response:
    files_of(state)
    assert state.batches is not None, "files come with batches"
    file_id = http.path_params["file_id"]
    await run_in_threadpool(state.batches.delete_file, file_id)
    return JSONBody({"id": file_id, "object": "file", "deleted": True})
