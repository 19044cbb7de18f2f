"""nvcli: an LLM engine you use from the terminal. Qwen3 on NVIDIA GPUs and on the CPU.

The names below are the Python API. What needs torch is imported on first use, so that
`import nvcli`, `nvcli --help` and shell completion stay fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.errors import NvcliError
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

if TYPE_CHECKING:
    from nvcli.config import EngineConfig
    from nvcli.engine.async_engine import AsyncEngine
    from nvcli.llm import LLM

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

_LAZY = {
    "LLM": "nvcli.llm",
    "AsyncEngine": "nvcli.engine.async_engine",
    "EngineConfig": "nvcli.config",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'nvcli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
