"""What `nvcli chat` begins with: a conversation, new or saved, and the tools of `--tools` and
`--mcp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvcli.errors import UsageError
from nvcli.repl.screen import visible
from nvcli.repl.session import Session
from nvcli.repl.store import SessionFile, latest_name, session_path

if TYPE_CHECKING:
    import contextlib

    from nvcli.cli.chat import ChatOptions
    from nvcli.repl.model import ChatModel
    from nvcli.repl.screen import Screen
    from nvcli.tools import Toolbox, ToolSource


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


def open_tools(options: ChatOptions, screen: Screen, stack: contextlib.ExitStack) -> Toolbox | None:
    """Raises `UsageError` for a file that cannot be loaded or a name that is no tool's."""
    if not options.tools and options.mcp is None:
        return None
    from nvcli.tools import Toolbox
    from nvcli.tools.functions import FunctionTools

    def say(line: str) -> None:
        if not screen.is_quiet:
            screen.write_err(f"  {visible(line)}\n", dim=True)

    sources: list[ToolSource] = []
    for path in options.tools:
        source = FunctionTools(path, say)
        stack.callback(source.close)
        sources.append(source)
    if options.mcp is not None:
        from nvcli.tools.mcp import open_servers

        taken = [spec.name for source in sources for spec in source.specs]
        for server in open_servers(options.mcp, screen.warn, taken):
            stack.callback(server.close)
            sources.append(server)
    box = Toolbox(sources)
    unknown = options.allowed_tools - {"*", *box.names}
    if unknown:
        raise UsageError(
            f"--allow-tool {min(unknown)}: there is no such tool",
            hint=f"Known: {', '.join(box.names) or 'none'}.",
        )
    return box
