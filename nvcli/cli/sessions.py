"""The conversation that `nvcli chat` begins with: a new one, or a saved one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvcli.errors import UsageError
from nvcli.repl.session import Session
from nvcli.repl.store import SessionFile, latest_name, session_path

if TYPE_CHECKING:
    from nvcli.cli.chat import ChatOptions
    from nvcli.repl.model import ChatModel
    from nvcli.repl.screen import Screen
    from nvcli.tools import Toolbox


def open_session(
    options: ChatOptions, screen: Screen, llm: ChatModel, tools: Toolbox | None
) -> Session:
    """Raises `UsageError` when there is nothing to continue, or it cannot be read."""
    if options.think and not llm.supports_thinking:
        screen.warn(f"{llm.model_name} has no thinking mode; --think changes nothing")
    session = Session(
        llm,
        think=options.think is not False,
        overrides=dict(options.sampling),
        tools=tools,
        schema=options.schema,
    )
    name = options.session
    if options.is_continued:
        name = latest_name()
        if name is None:
            raise UsageError("there is no conversation to continue")
    if name is not None:
        if session_path(name).exists():
            file, messages = SessionFile.load(name)
            session.restore(messages)
        else:
            file = SessionFile(name)
        session.file = file if options.is_saved else None
    if options.system is not None:
        session.system = options.system
    return session
