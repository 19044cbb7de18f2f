"""An MCP server of every kind: `python mcp_server.py KIND [FOLDER | PORT]`.

good: behaves. slow: takes a second for everything. crash: ends at its first call of `crash`.
dumb: reads and never answers. garbage: no JSON. wrong: JSON-RPC of the wrong shape. http: `good`
over HTTP at PORT.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

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


def proper() -> None:
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    server = MCPServer(KIND)

    @server.tool()
    def multiply(a: int, b: int) -> int:
        """Multiply two whole numbers."""
        if KIND == "slow":
            time.sleep(1)
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

    if len(sys.argv) > 2 and KIND == "http":
        server.run("streamable-http", port=int(sys.argv[2]))
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
