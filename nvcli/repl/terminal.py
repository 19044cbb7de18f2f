"""The conversation at the terminal: an input line, an answer, a status line, and again.

`converse` decides whether a line is a command or a message and shows the answer. While an answer
runs, Ctrl+C stops it, Ctrl+T ends its thinking, Ctrl+O folds it, and other keys are kept for the
next prompt.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from typing import TYPE_CHECKING, TextIO

from nvcli.errors import ContextLengthError, NvcliError
from nvcli.repl.command_turns import attach
from nvcli.repl.commands import interpret, run_command
from nvcli.repl.editor import edit_text
from nvcli.repl.files import expand_mentions
from nvcli.repl.numbers import SEPARATOR, context_meter, emptiness, ended_now, statistics_line
from nvcli.repl.prompt import Prompt
from nvcli.repl.render import AnswerRenderer, ThinkingView
from nvcli.repl.screen import visible
from nvcli.repl.tool_calls import MAX_ROUNDS, StoppedError, ask_short, run_calls
from nvcli.repl.typeahead import TypeAhead
from nvcli.text.words import counted
from nvcli.types import FinishReason, RequestOutput, fold_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvcli.repl.shell import Shell

_LOG = logging.getLogger(__name__)
NEARLY_FULL = 0.8  # of the context: from here on it is told


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


def show_turn(
    shell: Shell, deltas: Iterator[RequestOutput], keyboard: TextIO | None
) -> tuple[str, NvcliError | None]:
    """Print an answer as it comes, then its status line.

    Returns what was typed meanwhile, and the error that ended it.
    """
    screen = shell.screen
    renderer = AnswerRenderer(screen, thinking=shell.thinking, markdown=shell.markdown)
    received: list[RequestOutput] = []
    is_interrupted = False
    failure: NvcliError | None = None

    def answer_now() -> None:
        if not shell.session.answer_now():
            screen.note("this model cannot be told to answer now")

    def fold() -> None:
        is_full = shell.thinking is ThinkingView.FULL
        shell.thinking = ThinkingView.FOLD if is_full else ThinkingView.FULL
        renderer.show_thinking(shell.thinking)

    with contextlib.ExitStack() as stack:
        typeahead: TypeAhead | None = None
        if keyboard is not None:
            keys = {b"\x14": answer_now, b"\x0f": fold}
            typeahead = stack.enter_context(TypeAhead(keyboard.fileno(), keys))
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
        except SystemExit:  # SIGTERM: the shell's prompt begins a line of its own
            with contextlib.suppress(NvcliError):  # SIGHUP: the terminal may be gone
                renderer.finish()
            raise
        finally:
            deltas.close()  # type: ignore[attr-defined]  # a generator: the request is aborted
        output = fold_outputs(received) if received else None
        if output is not None and is_interrupted:
            output = ended_now(output)
        if output is not None and not shell.is_streaming:
            renderer.feed(output)
        renderer.finish()
    if output is not None and output.finish_reason is FinishReason.ERROR:
        failure = NvcliError(output.error or "the request failed")
    if failure is not None:
        screen.error(str(failure))
    elif output is None:
        screen.line_err("interrupted before the first token; /retry asks again", dim=True)
    else:
        empty = emptiness(output)
        if empty is not None and not is_interrupted:
            screen.warn(f"{empty}; /retry asks again")
        limit = shell.session.llm.max_model_len
        line = statistics_line(output, limit, is_interrupted=is_interrupted)
        is_shown = shell.show_stats or is_interrupted
        screen.line_err(line, dim=True, separator=SEPARATOR, is_shown=is_shown)
    return typeahead.text.strip("\n") if typeahead is not None else "", failure


def converse(
    shell: Shell, keyboard: TextIO, *, first: str = "", prefix: str = "", keep_history: bool = True
) -> None:
    """The loop. `first` is asked at once; `prefix` (attached files) goes before the first message.

    Ends on /exit and Ctrl+D. Raises what the terminal itself raises when it goes away.
    """
    shell.ask = lambda question: ask_short(shell.screen, keyboard, question)
    shell.edit = edit_text
    if prefix:
        shell.attachments.append(prefix)
    prompt = Prompt(shell, keyboard, keep_history=keep_history, fold=lambda: toggle_thinking(shell))
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
        try:
            if isinstance(action, str):
                draft = _send(shell, action, keyboard) or draft
                continue
            run_command(shell, *action)
            while shell.pending:
                draft = _ask(shell, shell.pending.pop(), "", keyboard) or draft
        except (NvcliError, OSError) as exc:
            shell.screen.line_err(str(exc))
            if isinstance(action, str):
                draft = action  # a file that cannot be read: nothing was sent
        except KeyboardInterrupt:  # of a command, or just before or behind an answer
            shell.screen.line_err("interrupted", dim=True)
        except Exception as exc:  # noqa: BLE001 - a bug must not cost the conversation
            _LOG.debug("unexpected error", exc_info=True)
            reason = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
            shell.screen.error(f"unexpected error: {reason}. This is a bug; --log-file tells where")
    shell.save()


def _send(shell: Shell, text: str, keyboard: TextIO) -> str:
    """A message with the files that were attached or that it names."""
    message, paths = expand_mentions(text)
    attach(shell, paths)
    whole = "\n\n".join([*shell.attachments, message])
    draft = _ask(shell, shell.session.turn(whole), whole, keyboard)
    if draft == whole:  # it was not taken: the files wait for the next try
        return text
    shell.attachments.clear()
    return draft


def _ask(shell: Shell, deltas: Iterator[RequestOutput], text: str, keyboard: TextIO) -> str:
    """Run a turn, with the tools it calls; returns the next draft: what was typed meanwhile, or a
    message not taken.
    """
    session = shell.session
    typed = ""
    turns_before = len(session.turns)
    for round_number in range(MAX_ROUNDS + 1):
        more, failure = show_turn(shell, deltas, keyboard)
        typed += more
        calls = session.pending_calls()
        if not calls or failure is not None or session.turns[-1].is_interrupted:
            break
        if round_number == MAX_ROUNDS or session.tools is None:
            shell.screen.warn(f"the model called tools {MAX_ROUNDS} times; its turn ends here")
            break
        try:
            results = run_calls(calls, session.tools, shell.screen, shell.allowed_tools, shell.ask)
        except StoppedError:
            session.turns[-1].is_interrupted = True
            shell.screen.line_err("interrupted; /retry asks again", dim=True)
            break
        session.answer_calls(results)
        deltas = session.resume()
    shell.save()
    was_refused = bool(text) and len(session.turns) == turns_before
    if isinstance(failure, ContextLengthError) and was_refused and session.turns:
        return _make_room(shell, text, keyboard)
    _warn_if_nearly_full(shell)
    return typed or (text if was_refused else "")


def _warn_if_nearly_full(shell: Shell) -> None:
    session = shell.session
    output = session.turns[-1].output if session.turns else None
    if output is None:
        return
    used, limit = output.usage.total_tokens, session.llm.max_model_len
    is_full = used >= limit and output.finish_reason is FinishReason.LENGTH
    if used < NEARLY_FULL * limit:
        shell.has_warned = False
    elif is_full or not shell.has_warned:
        shell.has_warned = True
        what = "full: the answer was cut" if is_full else "nearly full"
        shell.screen.warn(
            f"the context is {what}, {context_meter(used, limit)};"
            " /undo takes turns back, /clear starts over, /fork NAME keeps this one"
        )


def _make_room(shell: Shell, text: str, keyboard: TextIO) -> str:
    """The message does not fit beside the conversation: the user says what gives way."""
    question = (
        "  [d]rop the oldest turns until it fits, [c]lear the conversation, or keep all and edit"
        " the message [Enter]: "
    )
    answer = ""
    with contextlib.suppress(KeyboardInterrupt):
        answer = (shell.ask(question) if shell.ask is not None else "").strip().lower()
    session = shell.session
    if answer in ("d", "drop"):
        room = session.llm.count_tokens(text) + 64
        count = session.drop_oldest(room + min(256, session.llm.max_model_len // 8))
        shell.screen.note(f"dropped {counted(count, 'turn')}")
        shell.has_warned = False
    elif answer in ("c", "clear"):
        run_command(shell, "clear", "")
    else:
        return text
    return _ask(shell, session.turn(text), text, keyboard)


def toggle_thinking(shell: Shell) -> None:
    """Ctrl+O at the prompt: shows the last thinking, or folds what comes next."""
    if shell.thinking is ThinkingView.FULL:
        shell.thinking = ThinkingView.FOLD
        shell.screen.note("thinking is folded from here on; Ctrl+O shows it")
        return
    shell.thinking = ThinkingView.FULL
    turn = shell.session.turns[-1] if shell.session.turns else None
    if turn is not None and turn.output is not None and turn.output.reasoning:
        shell.screen.write_err(visible(turn.output.reasoning.strip("\n")) + "\n", dim=True)
    else:
        shell.screen.note("thinking is shown from here on")
