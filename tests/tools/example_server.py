"""An MCP server: over stdio, or with a port over HTTP."""

from __future__ import annotations

import sys
import time

from mcp.server import MCPServer

server = MCPServer("example")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


@server.tool()
def fail() -> str:
    """Always fail."""
    raise ValueError("it is broken")


@server.tool()
def hang() -> str:
    """Never answer in time."""
    time.sleep(10)
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
