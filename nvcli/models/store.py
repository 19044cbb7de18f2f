"""The models on this machine: the built-in one and those in the Hugging Face cache.

Reads folders only, so that `nvcli models list` and shell completion are quick; what changes the
cache goes through huggingface_hub.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nvcli.config import DEFAULT_MODEL
from nvcli.models.resolve import demo_folder
from nvcli.paths import expand_user, home_folder

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that can be loaded without a network."""

    name: str
    folder: Path  # with config.json
    size_bytes: int
    is_builtin: bool = False


def cache_folder() -> Path:
    """Where huggingface_hub keeps repositories, by its environment variables."""
    env = os.environ
    if env.get("HF_HUB_CACHE"):
        return expand_user(env["HF_HUB_CACHE"])
    if env.get("HF_HOME"):
        return expand_user(env["HF_HOME"]) / "hub"
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else home_folder() / ".cache") / "huggingface" / "hub"


def stored_models() -> list[StoredModel]:
    """The built-in model first, then the cache's in order of name."""
    demo = demo_folder()
    found = [StoredModel(DEFAULT_MODEL, demo, folder_size(demo), is_builtin=True)]
    for repository in sorted(_folders(cache_folder(), _PREFIX)):
        snapshot = current_snapshot(repository)
        if snapshot is not None and (snapshot / "config.json").exists():
            name = repository.name.removeprefix(_PREFIX).replace("--", "/")
            found.append(StoredModel(name, snapshot, folder_size(repository / "blobs")))
    return found


def repository_folder(name: str) -> Path:
    """Where the cache keeps the repository `name`, whether it is there or not."""
    return cache_folder() / f"{_PREFIX}{name.replace('/', '--')}"


def current_snapshot(repository: Path) -> Path | None:
    """The snapshot that `main` points to, or else the newest; None where there is none."""
    try:
        revision = (repository / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        revision = ""
    snapshots = _folders(repository / "snapshots")
    snapshots.sort(key=lambda s: (s.name == revision, s.stat().st_mtime))
    return snapshots[-1] if snapshots else None


def folder_size(folder: Path) -> int:
    """Bytes of the files in it, links followed."""
    if not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _folders(folder: Path, prefix: str = "") -> list[Path]:
    try:
        return [p for p in folder.iterdir() if p.name.startswith(prefix) and p.is_dir()]
    except OSError:
        return []
