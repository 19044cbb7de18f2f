"""Tools for a model: Python functions in a process of their own, and MCP servers. The REPL,
one-shot answers and the server take them from here.
"""

from nvcli.tools.toolbox import Toolbox, ToolError, ToolSource, cut_result

__all__ = ["ToolError", "ToolSource", "Toolbox", "cut_result"]
