"""The tools that `--tools` and `--mcp` name, opened for one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvcli.errors import UsageError
from nvcli.repl.screen import visible

if TYPE_CHECKING:
    import contextlib

    from nvcli.cli.chat import ChatOptions
    from nvcli.repl.screen import Screen
    from nvcli.tools import Toolbox, ToolSource


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
