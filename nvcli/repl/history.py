"""The history of typed lines: a private file that can never break the conversation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nvcli.paths import state_folder
from nvcli.repl.screen import repair

if TYPE_CHECKING:
    from collections.abc import Callable

    from prompt_toolkit.history import History

MAX_ENTRY = 64 * 1024  # characters; a larger paste is not worth keeping


def open_history(expand: Callable[[str], str], warn: Callable[[str], None]) -> History:
    """The history file, made with mode 0600; without it (read-only, full) history in memory.

    `expand` turns what stands in the input line into what was meant: folded pastes in full.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class PrivateHistory(FileHistory):
        is_on = True

        def append_string(self, string: str) -> None:
            text = repair(expand(string))
            if self.is_on and len(text) <= MAX_ENTRY:
                super().append_string(text)

        def recent(self, count: int) -> list[str]:
            """The last lines, the newest last."""
            return self.get_strings()[-count:]

        def clear(self) -> None:
            self._loaded_strings.clear()
            try:
                os.truncate(path, 0)
            except OSError as exc:
                warn(f"the history cannot be emptied: {exc.strerror or exc}")

        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as exc:
                warn(f"the history cannot be saved: {exc.strerror or exc}")

    path = state_folder() / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
        path.chmod(0o600)
    except OSError as exc:
        warn(f"the history is not kept: {path}: {exc.strerror or exc}")
        return InMemoryHistory()
    return PrivateHistory(str(path))
