"""The input line: prompt_toolkit with our keys, folded pastes, completion and history."""

from __future__ import annotations

import contextlib
import errno
import signal
from typing import TYPE_CHECKING, Any, TextIO, cast

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.shortcuts import CompleteStyle

from nvcli.errors import HungUpRunError, NvcliError, TerminatedRunError
from nvcli.repl.commands import completions
from nvcli.repl.history import open_history
from nvcli.repl.typeahead import typed_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from prompt_toolkit.document import Document

    from nvcli.repl.screen import Screen
    from nvcli.repl.shell import Shell

FOLD_LINES = 20
FOLD_CHARACTERS = 4096
BLOCK = '"""'
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Prompt:
    """Reads one message or command; folded pastes come back in full."""

    def __init__(
        self, shell: Shell, keyboard: TextIO, *, keep_history: bool, fold: Callable[[], None]
    ) -> None:
        """`fold` is what Ctrl+O does."""
        screen: Screen = shell.screen
        self._shell = shell
        self._screen = screen
        self._show_thinking = fold
        self._pastes: dict[str, str] = {}
        self._input = create_input(keyboard)
        history: History = InMemoryHistory()
        if keep_history:
            history = open_history(self.expand, screen.warn)
            shell.history = cast("Any", history) if hasattr(history, "recent") else None
        self._session: PromptSession[str] = PromptSession(
            message=FormattedText([("bold", ">>> ")]),
            prompt_continuation=FormattedText([("", "... ")]),
            multiline=True,
            history=history,
            completer=_CommandCompleter(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            enable_suspend=True,
            key_bindings=self._bindings(),
            color_depth=None if screen.out_color else ColorDepth.DEPTH_1_BIT,
            input=self._input,
        )

    def read(self, draft: str) -> tuple[str, str]:
        """What was entered, and what was typed after it (a paste without bracketed mode).

        Raises `EOFError` on Ctrl+D and `KeyboardInterrupt` on Ctrl+C, both on an empty line, and
        `TerminatedRunError` or `HungUpRunError` after a signal or without a terminal.
        """
        self._pastes.clear()
        if is_large(draft):
            draft = self._fold(draft)
        try:
            with self._ending_on_signals():
                text = self.expand(self._session.prompt(default=draft))
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            raise HungUpRunError("the terminal is gone") from exc
        rest = "".join(_key_text(key.key, key.data) for key in get_typeahead(self._input))
        return unquote_block(text), typed_text(rest)

    @contextlib.contextmanager
    def _ending_on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGHUP end the prompt the orderly way, so that prompt_toolkit resets the
        terminal; one that is ignored stays so."""
        app = self._session.app

        def leave(error: NvcliError) -> None:
            if app.future is not None and not app.future.done():
                app.exit(exception=error)

        def terminate(signum: int, frame: FrameType | None) -> None:
            if app.loop is not None and app.is_running:
                app.loop.call_soon_threadsafe(leave, _end_of(signum))
            elif callable(handler := previous[signum]):
                handler(signum, frame)

        previous = {
            number: signal.signal(number, terminate)
            for number in _ENDING
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def expand(self, text: str) -> str:
        """`text` with each fold that is still whole replaced by what was pasted."""
        for label, paste in self._pastes.items():
            text = text.replace(label, paste)
        return text

    def _fold(self, paste: str) -> str:
        lines = paste.removesuffix("\n").count("\n") + 1
        label = f"[pasted {lines} lines]"
        number = 2
        while self._pastes.get(label, paste) != paste:
            label = f"[pasted {lines} lines, {number}]"
            number += 1
        self._pastes[label] = paste
        return label

    def _send(self, event: KeyPressEvent) -> None:
        if event.current_buffer.text.strip():
            event.current_buffer.validate_and_handle()

    def _edit(self, event: KeyPressEvent) -> None:
        """The line, or the folded paste in full, through the editor."""
        buffer = event.current_buffer

        def edit() -> None:
            try:
                text = self._shell.edit(self.expand(buffer.text)) if self._shell.edit else ""
            except NvcliError as exc:
                self._screen.line_err(str(exc))
                return
            self._pastes.clear()
            text = text.removesuffix("\n")
            buffer.text = self._fold(text) if is_large(text) else text
            buffer.cursor_position = len(buffer.text)

        run_in_terminal(edit)

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def _enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            is_block = self.expand(buffer.text).lstrip().startswith(BLOCK)
            is_command = buffer.text.startswith("/") and "\n" not in buffer.text
            if (is_block and not _is_closed(buffer.text)) or (
                self._shell.is_multiline and not is_command
            ):
                buffer.insert_text("\n")
            else:
                self._send(event)

        @keys.add("escape", "enter")
        def _alt_enter(event: KeyPressEvent) -> None:
            if self._shell.is_multiline:
                self._send(event)
            else:
                event.current_buffer.insert_text("\n")

        @keys.add("c-j")
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        def _cancel(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt)

        @keys.add("c-g")
        @keys.add("c-x", "c-e")
        def _editor(event: KeyPressEvent) -> None:
            self._edit(event)

        @keys.add("c-o")
        def _fold_thinking(event: KeyPressEvent) -> None:
            run_in_terminal(self._show_thinking)

        @keys.add("c-t")
        def _answer_now(event: KeyPressEvent) -> None:
            """Only while an answer runs; a late press does nothing."""

        @keys.add(Keys.BracketedPaste)
        def _paste(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            event.current_buffer.insert_text(self._fold(text) if is_large(text) else text)

        return keys


class _CommandCompleter(Completer):
    def get_completions(self, document: Document, complete_event: Any) -> Iterable[Completion]:
        line = document.current_line_before_cursor
        start = -len(line.rpartition(" ")[2])
        if line.startswith("/") and document.text_before_cursor != line:
            return  # a line of a message
        for word in completions(line):
            yield Completion(word, start_position=start)


def is_large(text: str) -> bool:
    """Whether a paste is folded."""
    return text.count("\n") >= FOLD_LINES or len(text) > FOLD_CHARACTERS


def unquote_block(text: str) -> str:
    """The inside of a triple-quoted block, or `text` as it is."""
    stripped = text.strip()
    if _is_closed(stripped) and stripped.startswith(BLOCK):
        return stripped[3:-3].strip("\n")
    return text


def _is_closed(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) >= 6 and stripped.endswith(BLOCK)


def _key_text(key: Keys | str, data: str) -> str:
    if key is Keys.BracketedPaste:
        return data
    if key in (Keys.ControlM, Keys.ControlJ):
        return "\n"
    return data


def _end_of(signum: int) -> NvcliError:
    if signum == signal.SIGTERM:
        return TerminatedRunError("terminated")
    return HungUpRunError("hung up")
