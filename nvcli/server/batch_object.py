"""A batch as OpenAI's API shows it, and as it lies on the disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nvcli.errors import NvcliError
from nvcli.server.files import new_id

if TYPE_CHECKING:
    from pathlib import Path

WINDOW_S = 24 * 3600
OPEN = ("validating", "in_progress", "finalizing", "cancelling")  # what it is before it has ended
_MOMENTS = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)

Batch = dict[str, Any]


def new_batch(file_id: str, endpoint: str, window: str, metadata: dict[str, str]) -> Batch:
    now = int(time.time())
    return {
        "id": new_id("batch_"),
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": file_id,
        "completion_window": window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        **dict.fromkeys(_MOMENTS),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
    }


def shown(batch: Batch) -> Batch:
    """As OpenAI's description has it: what is not there yet is left out, never null."""
    return {key: value for key, value in batch.items() if value is not None}


def batch_error(code: str, message: str, line: int | None = None, param: str | None = None) -> Any:
    return {"code": code, "message": message[:500], "line": line, "param": param}


def reason_of(error: Exception, *, hidden: tuple[Path, ...]) -> str:
    """Why a batch has failed, for its client: without the folders, which are the server's."""
    if isinstance(error, NvcliError):
        reason = error.message
        for folder in hidden:
            reason = reason.replace(f"{folder}/", "")
        return reason
    if isinstance(error, OSError):
        return f"the server's storage: {error.strerror or type(error).__name__}"
    return type(error).__name__
