"""From what a user calls a model to a folder with its files: the built-in model, a local folder, or
a Hugging Face id, whose files are fetched once into the Hugging Face cache.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from nvcli.config import DEFAULT_MODEL
from nvcli.errors import ModelNotFoundError, first_line
from nvcli.paths import expand_user

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# All that an engine reads of a repository; weights in other formats are left where they are.
FILE_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def demo_folder() -> Path:
    """The checkpoint that ships with the package."""
    return Path(__file__).resolve().parent.parent / "demo"


def resolve_model(name: str) -> Path:
    """Find, or fetch, the folder of `name`; a download shows its progress on stderr.

    Raises `ModelNotFoundError` with the next step.
    """
    if name == DEFAULT_MODEL:
        return demo_folder()
    if not name.strip():
        raise ModelNotFoundError(
            "the name of the model is empty",
            hint="Give a local folder or a Hugging Face id such as Qwen/Qwen3-0.6B.",
        )
    folder = expand_user(name)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ModelNotFoundError(
            f"{name} is a file, not a folder", hint="Give the folder that holds config.json."
        )
    if not is_hub_id(name):
        raise ModelNotFoundError(
            f"there is no folder {name}",
            hint="Give a local folder or a Hugging Face id such as Qwen/Qwen3-0.6B.",
        )
    return _cached(name) or _download(name)


def is_hub_id(name: str) -> bool:
    """Whether `name` may be a model of the Hugging Face hub."""
    return _HUB_ID.fullmatch(name) is not None


def find_local(name: str) -> Path | None:
    """The folder of `name` if it is on this machine; nothing is fetched."""
    folder = expand_user(name)
    if name == DEFAULT_MODEL or folder.is_dir():
        return resolve_model(name)
    return _cached(name) if is_hub_id(name) else None


@contextlib.contextmanager
def some_files(name: str, *files: str) -> Iterator[Path]:
    """A folder with these files of `name`, for callers that need no weights.

    A model that is not on this machine is not fetched whole: only `files` are, into a temporary
    folder, since a model without weights in the cache would be taken for a complete one. The path
    of a config.json stands for its folder. Raises `ModelNotFoundError`.
    """
    path = expand_user(name)
    if path.name == "config.json" and path.is_file():
        yield path.parent
    elif (folder := find_local(name)) is not None:
        yield folder
    elif not is_hub_id(name):
        yield resolve_model(name)  # raises: no folder and no id
    else:
        with tempfile.TemporaryDirectory(prefix="nvcli-") as temporary:
            yield _download(
                name, files, temporary, hint="a local folder or the path of its config.json"
            )


def fetch_model(name: str, *, is_quiet: bool) -> Path:
    """Fetch what is missing or has changed of a Hugging Face id. Raises `ModelNotFoundError`."""
    if not is_hub_id(name):
        raise ModelNotFoundError(
            f"{name} is no Hugging Face id", hint="An id looks like Qwen/Qwen3-0.6B."
        )
    if is_quiet:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    return _download(name)


def _cached(repo_id: str) -> Path | None:
    """The snapshot of a Hugging Face id in the cache; None where there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=FILE_PATTERNS, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _download(
    repo_id: str,
    patterns: Sequence[str] = FILE_PATTERNS,
    folder: str | None = None,
    hint: str = "a local folder",
) -> Path:
    """Fetch an id into the cache, or into `folder`. Raises `ModelNotFoundError`, whose hint names
    `hint` as what may be given instead.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"{repo_id} is not in the cache, and HF_HUB_OFFLINE forbids fetching it",
            hint=f"Unset HF_HUB_OFFLINE or give {hint}.",
        )
    try:
        found = snapshot_download(repo_id, allow_patterns=list(patterns), local_dir=folder)
        return Path(found)
    except HFValidationError as error:
        raise ModelNotFoundError(f"{repo_id!r} is no Hugging Face id") from error
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{repo_id} is gated", hint="Accept its terms on its page and set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no folder and no Hugging Face model {repo_id}",
            hint="Check the spelling; a private model needs HF_TOKEN.",
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"{repo_id} is not in the cache and could not be fetched ({first_line(error)})",
            hint=f"Check the network, or give {hint}.",
        ) from error
