"""nvcli: an LLM engine you use from the terminal. Qwen3 on NVIDIA GPUs and on the CPU.

The names below are the Python API. Each is imported on first use, so that `import nvcli`,
`nvcli --help` and shell completion stay fast, and so that Ctrl-C during the imports already finds
`__main__.main`, which handles it.
"""

TYPE_CHECKING = False  # as type checkers know it, without what `typing` imports
if TYPE_CHECKING:
    from typing import Any

    from nvcli.config import EngineConfig
    from nvcli.engine.async_engine import AsyncEngine
    from nvcli.errors import NvcliError
    from nvcli.llm import LLM
    from nvcli.types import (
        FinishReason,
        Message,
        RequestOutput,
        RequestTimes,
        SamplingParams,
        TokenLogprob,
        ToolCall,
        Usage,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "EngineConfig",
    "FinishReason",
    "Message",
    "NvcliError",
    "RequestOutput",
    "RequestTimes",
    "SamplingParams",
    "TokenLogprob",
    "ToolCall",
    "Usage",
    "__version__",
]

_LAZY = dict.fromkeys(__all__, "nvcli.types") | {
    "LLM": "nvcli.llm",
    "AsyncEngine": "nvcli.engine.async_engine",
    "EngineConfig": "nvcli.config",
    "NvcliError": "nvcli.errors",
}


def __getattr__(name: str) -> "Any":
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'nvcli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
