"""An MCP server of every kind: `python mcp_server.py KIND [FOLDER]`.

good: behaves. held: multiplies only once there is a file `go` in the folder. dumb: reads and never
answers. garbage: no JSON. wrong: JSON-RPC of the wrong shape. http: `good` over HTTP, at the port
that it prints.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

KIND = sys.argv[1]


def write_lines(text: str) -> None:
    for _ in sys.stdin:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def wrong() -> None:
    import json

    for line in sys.stdin:
        number = json.loads(line).get("id")
        answer = {"jsonrpc": "2.0", "id": number, "result": {"tools": 5, "protocolVersion": []}}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def serve_http(app: Any) -> None:
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


def proper() -> None:
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    server = MCPServer(KIND)

    @server.tool()
    def multiply(a: int, b: int) -> int:
        """Multiply two whole numbers."""
        while KIND == "held" and not (Path(sys.argv[2]) / "go").exists():
            time.sleep(0.01)
        return a * b

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def read(name: str = "x") -> str:
        """Read something."""
        return f"content of {name}"

    @server.tool()
    def fail() -> str:
        """Always fail."""
        raise ValueError("it is broken")

    @server.tool()
    def crash() -> str:
        """End the process."""
        os._exit(3)

    @server.tool()
    def flood() -> str:
        """Give far too much."""
        return "x" * 1_000_000

    if KIND == "http":
        serve_http(server.streamable_http_app())
    else:
        if len(sys.argv) > 2:
            (Path(sys.argv[2]) / f"{KIND}-{os.getpid()}").touch()
        server.run("stdio")


if __name__ == "__main__":
    match KIND:
        case "dumb":
            for _ in sys.stdin:
                pass
        case "garbage":
            write_lines("this is { no json")
        case "wrong":
            wrong()
        case _:
            proper()
