"""`nvcli chat` without a prompt: load the model and hand over to the REPL."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from nvcli import __version__
from nvcli.cli import chat as chat_command
from nvcli.cli.console import is_terminal
from nvcli.cli.sessions import open_session, open_tools
from nvcli.client import ServerModel
from nvcli.errors import NvcliError
from nvcli.repl.numbers import short_count
from nvcli.repl.shell import Shell, first_line
from nvcli.repl.store import SessionFile, new_name
from nvcli.text.words import counted

if TYPE_CHECKING:
    from nvcli.cli.chat import ChatOptions
    from nvcli.repl.model import ChatModel
    from nvcli.repl.screen import Screen
    from nvcli.repl.session import Session


class ModelSwitch:
    """The model of the conversation; `/model` puts another in its place."""

    def __init__(self, options: ChatOptions, screen: Screen) -> None:
        self._config = options.config
        self._screen = screen
        self.llm: ChatModel = chat_command.connect(options, screen)
        self.session: Session | None = None

    def open(self, name: str) -> ChatModel:
        """Two may not fit, so the old one is closed first; it comes back if the new one fails.

        Raises `ModelError` without closing anything where there is no such model. A conversation
        with a server asks that server first, and keeps it until the new model is there.
        """
        if isinstance(self.llm, ServerModel):
            server = self.llm
            self.llm = server.with_model(name) or self._load_here(name, server)
            server.close()
            return self.llm
        chat_command.find_model(name)
        old = self._config
        self.llm.close()
        try:
            self._config = old.replace(model=name)
            self.llm = chat_command.open_model(self._config, self._screen)
        except (NvcliError, KeyboardInterrupt):
            self._config = old
            self.llm = chat_command.open_model(old, self._screen)
            if self.session is not None:
                self.session.llm = self.llm
            raise
        return self.llm

    def _load_here(self, name: str, server: ServerModel) -> ChatModel:
        chat_command.find_model(name)
        config = self._config.replace(model=name)
        llm = chat_command.open_model(config, self._screen)
        self._config = config
        self._screen.note(f"{server.where} does not serve {name}; it runs here")
        return llm

    def close(self) -> None:
        self.llm.close()


def converse(options: ChatOptions, screen: Screen, text: str, *, asks_now: bool) -> None:
    """`text` is asked at once, or (files without a question) goes with the first message."""
    with contextlib.ExitStack() as stack:
        tools = open_tools(options, screen, stack)
        switch = stack.enter_context(contextlib.closing(ModelSwitch(options, screen)))
        llm = switch.llm
        from nvcli.repl import terminal  # prompt_toolkit comes with it

        keyboard = sys.stdin
        if not is_terminal(keyboard):
            keyboard = stack.enter_context(open("/dev/tty", encoding="utf-8"))
        session = switch.session = open_session(options, screen, llm, tools)
        if session.file is None and options.is_saved:
            session.file = SessionFile(new_name())
        shell = Shell(
            session,
            screen,
            thinking=options.thinking_view(screen),
            show_stats=options.show_stats or (screen.err_is_terminal and not screen.is_quiet),
            markdown=options.use_markdown(screen),
            is_streaming=options.is_streaming,
            allowed_tools=set(options.allowed_tools),
            open_model=switch.open,
        )
        if not screen.is_quiet:
            window = short_count(llm.max_model_len)
            shell.say(f"nvcli {__version__} · {llm.model_name} · {window} context · /help")
            if session.turns:
                last = first_line(session.turns[-1].user)
                name = session.file.name if session.file is not None else "the last conversation"
                shell.say(f"{name}, {counted(len(session.turns), 'turn')}, the last: {last}")
        terminal.converse(
            shell,
            keyboard,
            first=text if asks_now else "",
            prefix="" if asks_now else text,
            keep_history=options.keep_history,
        )
