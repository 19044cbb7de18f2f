"""`nvcli chat` without a prompt: load the model and hand over to the REPL."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from nvcli import __version__
from nvcli.cli import chat as chat_command
from nvcli.cli.console import is_terminal
from nvcli.repl.commands import Shell
from nvcli.repl.session import Session, short_count

if TYPE_CHECKING:
    from nvcli.cli.chat import ChatOptions
    from nvcli.repl.screen import Screen


def converse(options: ChatOptions, screen: Screen, text: str, *, asks_now: bool) -> None:
    """`text` is asked at once, or (files without a question) goes with the first message."""
    llm = chat_command.open_model(options.config, screen)
    with contextlib.closing(llm), contextlib.ExitStack() as stack:
        from nvcli.repl import terminal  # prompt_toolkit comes with it

        keyboard = sys.stdin
        if not is_terminal(keyboard):
            keyboard = stack.enter_context(open("/dev/tty", encoding="utf-8"))
        if options.think and not llm.supports_thinking:
            screen.warn(f"{llm.model_name} has no thinking mode; --think changes nothing")
        session = Session(
            llm, options.system, think=options.think is not False, overrides=options.sampling
        )
        shell = Shell(
            session,
            screen,
            thinking=options.thinking_view(screen),
            show_stats=options.show_stats or (screen.err_is_terminal and not screen.is_quiet),
            markdown=options.use_markdown(screen),
            is_streaming=options.is_streaming,
        )
        if not screen.is_quiet:
            window = short_count(llm.max_model_len)
            shell.say(f"nvcli {__version__} · {llm.model_name} · {window} context · /help")
        terminal.converse(
            shell,
            keyboard,
            first=text if asks_now else "",
            prefix="" if asks_now else text,
            keep_history=options.keep_history,
        )
