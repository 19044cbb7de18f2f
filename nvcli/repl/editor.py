"""A text in the user's editor, $VISUAL or $EDITOR."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from nvcli.errors import UsageError


def edit_text(text: str) -> str:
    """The text as the editor left it. Raises `UsageError` when the editor fails."""
    chosen = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        command = shlex.split(chosen)
    except ValueError as exc:
        raise UsageError(f"the editor {chosen!r} is no command: {exc}", hint="Set EDITOR.") from exc
    if not command:
        raise UsageError("the editor's command is empty", hint="Set EDITOR.")
    with tempfile.TemporaryDirectory(prefix="nvcli-") as folder:
        path = Path(folder) / "message.md"
        path.write_text(text, encoding="utf-8", errors="replace")
        try:
            code = subprocess.run([*command, str(path)], check=False).returncode
        except OSError as exc:
            raise UsageError(
                f"cannot start the editor {command[0]}: {exc.strerror or exc}", hint="Set EDITOR."
            ) from exc
        if code != 0:
            raise UsageError(f"the editor {command[0]} ended with {code}; nothing was changed")
        return path.read_text("utf-8", "replace")
