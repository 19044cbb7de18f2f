"""The conversation at the terminal: a prompt_toolkit line, an answer, a status line, and again.

Only this module knows keys. A line is read by `Prompt`; `converse` decides whether it is a command
or a message and shows the answer. While an answer runs, Ctrl+C stops it and typed keys are kept for
the next prompt.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.shortcuts import CompleteStyle

from nvcli.errors import NvcliError, TerminatedRunError
from nvcli.repl.commands import Shell, completions, interpret, run_command
from nvcli.repl.history import open_history
from nvcli.repl.render import AnswerRenderer
from nvcli.repl.screen import Screen, visible
from nvcli.repl.session import statistics_line
from nvcli.repl.typeahead import TypeAhead, typed_text
from nvcli.types import FinishReason, RequestOutput, fold_outputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from prompt_toolkit.document import Document

FOLD_LINES = 20
FOLD_CHARACTERS = 4096
BLOCK = '"""'


class Prompt:
    """Reads one message or command; folded pastes come back in full."""

    def __init__(self, screen: Screen, keyboard: TextIO, *, keep_history: bool) -> None:
        self._screen = screen
        self._pastes: dict[str, str] = {}
        self._input = create_input(keyboard)
        history = open_history(self.expand, screen.warn) if keep_history else InMemoryHistory()
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

        Raises `EOFError` on Ctrl+D and `KeyboardInterrupt` on Ctrl+C, both on an empty line.
        """
        self._pastes.clear()
        if is_large(draft):
            draft = self._fold(draft)
        with self._ending_on_sigterm():
            text = self.expand(self._session.prompt(default=draft))
        rest = "".join(_key_text(key.key, key.data) for key in get_typeahead(self._input))
        return unquote_block(text), typed_text(rest)

    @contextlib.contextmanager
    def _ending_on_sigterm(self) -> Iterator[None]:
        """SIGTERM ends the prompt the orderly way, so that prompt_toolkit resets the terminal."""
        app = self._session.app

        def terminate(signum: int, frame: FrameType | None) -> None:
            if app.loop is not None and app.is_running:
                error = TerminatedRunError("terminated")
                app.loop.call_soon_threadsafe(lambda: app.exit(exception=error))
            elif callable(previous):
                previous(signum, frame)

        previous = signal.signal(signal.SIGTERM, terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def expand(self, text: str) -> str:
        """`text` with each fold that is still whole replaced by what was pasted."""
        for label, paste in self._pastes.items():
            text = text.replace(label, paste)
        return text

    def _fold(self, paste: str) -> str:
        lines = paste.count("\n") + 1
        label = f"[pasted {lines} lines]"
        number = 2
        while self._pastes.get(label, paste) != paste:
            label = f"[pasted {lines} lines, {number}]"
            number += 1
        self._pastes[label] = paste
        return label

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def _send(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if self.expand(buffer.text).lstrip().startswith(BLOCK) and not _is_closed(buffer.text):
                buffer.insert_text("\n")
            elif buffer.text.strip():
                buffer.validate_and_handle()

        @keys.add("c-j")
        @keys.add("escape", "enter")
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        def _cancel(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt)

        @keys.add(Keys.BracketedPaste)
        def _paste(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            event.current_buffer.insert_text(self._fold(text) if is_large(text) else text)

        return keys


class _CommandCompleter(Completer):
    def get_completions(self, document: Document, complete_event: Any) -> Iterable[Completion]:
        line = document.text_before_cursor
        if line.startswith("/") and "\n" not in line:
            start = -len(line.rpartition(" ")[2])
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


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Ctrl+C raises KeyboardInterrupt once; more of them while that unwinds do nothing."""
    has_fired = False

    def interrupt(signum: int, frame: object) -> None:
        nonlocal has_fired
        if not has_fired:
            has_fired = True
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def show_turn(shell: Shell, deltas: Iterator[RequestOutput], typeahead: TypeAhead | None) -> bool:
    """Print an answer as it comes, then its status line. Returns whether anything was answered."""
    screen = shell.screen
    renderer = AnswerRenderer(screen, thinking=shell.thinking, markdown=shell.markdown)
    received: list[RequestOutput] = []
    is_interrupted = False
    failure: NvcliError | None = None
    try:
        with one_interrupt():
            for delta in deltas:
                received.append(delta)
                if shell.is_streaming:
                    renderer.feed(delta)
                if typeahead is not None:
                    typeahead.poll()
    except KeyboardInterrupt:
        is_interrupted = True
    except NvcliError as exc:
        failure = exc
    finally:
        deltas.close()  # type: ignore[attr-defined]  # a generator: the request is aborted
    output = fold_outputs(received) if received else None
    if output is not None and not shell.is_streaming:
        renderer.feed(output)
    renderer.finish()
    if output is not None and output.finish_reason is FinishReason.ERROR:
        failure = NvcliError(output.error or "the request failed")
    if failure is not None:
        screen.warn(str(failure))
    elif output is None:
        screen.write_err("interrupted before the first token; /retry asks again\n", dim=True)
    elif shell.show_stats or is_interrupted:
        limit = shell.session.llm.max_model_len
        line = statistics_line(output, limit, is_interrupted=is_interrupted)
        screen.write_err(f"{line}\n", dim=True)
    return output is not None


def converse(
    shell: Shell,
    keyboard: TextIO,
    *,
    first: str = "",
    prefix: str = "",
    keep_history: bool = True,
) -> None:
    """The loop. `first` is asked at once; `prefix` (attached files) goes before the first message.

    Ends on /exit and Ctrl+D. Raises what the terminal itself raises when it goes away.
    """
    prompt = Prompt(shell.screen, keyboard, keep_history=keep_history)
    draft = _ask(shell, shell.session.turn(first), first, keyboard) if first else ""
    while not shell.is_over:
        try:
            text, draft = prompt.read(draft)
        except EOFError:
            break
        except KeyboardInterrupt:
            shell.screen.note("Ctrl+D or /exit leaves.")
            draft = ""
            continue
        action = interpret(text.rstrip())
        if isinstance(action, str):
            message = f"{prefix}\n\n{action}" if prefix else action
            prefix = ""
            draft = _ask(shell, shell.session.turn(message), message, keyboard) or draft
            continue
        try:
            run_command(shell, *action)
            while shell.pending:
                draft = _ask(shell, shell.pending.pop(), "", keyboard) or draft
        except NvcliError as exc:
            shell.screen.write_err(visible(f"{exc}\n"))


def _ask(shell: Shell, deltas: Iterator[RequestOutput], text: str, keyboard: TextIO) -> str:
    """Run a turn; returns the next draft: what was typed meanwhile, or a message not taken."""
    turns_before = len(shell.session.turns)
    with TypeAhead(keyboard.fileno()) as typeahead:
        show_turn(shell, deltas, typeahead)
    was_refused = bool(text) and len(shell.session.turns) == turns_before
    return typeahead.text.strip("\n") or (text if was_refused else "")
