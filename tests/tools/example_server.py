"""An MCP server: over stdio, or with `http` over HTTP, at the port that it prints."""

from __future__ import annotations

import socket
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
    """Never answer."""
    time.sleep(3600)
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import uvicorn

        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
            app = server.streamable_http_app()
            uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
    else:
        server.run("stdio")
