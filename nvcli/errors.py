"""Every error a user can meet, on one page.

A class knows the exit code of the command line (`docs/cli.md` lists them), the HTTP status and
OpenAI error code of the server, and may carry a hint: what to do next. The message says what is
wrong and where; it is one line and never a traceback.

Assertions are for our own invariants; anything a user can cause raises one of these.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Iterable


class NvcliError(Exception):
    """Base of all errors that nvcli raises on purpose.

    `message` is one line; `hint`, where given, is the next step and is printed after it; `param`
    names the field, flag or key at fault.
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


# --- usage: the command line, configuration and files given to us --------------------------------


class UsageError(NvcliError):
    """A flag, argument, configuration value or input file is wrong."""

    exit_code = 2
    http_status = 400
    code = "invalid_request"


class InvalidParameterError(UsageError):
    """A sampling or request parameter is out of range or contradicts another."""

    code = "invalid_parameter"


class UnsupportedParameterError(UsageError):
    """A known parameter or value that this version refuses by name."""

    code = "unsupported_parameter"


# --- model and device ----------------------------------------------------------------------------


class ModelError(NvcliError):
    """The model or the device cannot be used."""

    exit_code = 3
    http_status = 503
    code = "model_unavailable"


class ModelNotFoundError(ModelError):
    """No folder, cache entry or hub repository of that name."""

    http_status = 404
    code = "model_not_found"


class UnsupportedModelError(ModelError):
    """The checkpoint's architecture, RoPE type, dtype or format is not supported."""

    code = "unsupported_model"


class WeightsError(ModelError):
    """A safetensors file is missing, truncated or does not match the architecture."""

    code = "invalid_weights"


class TokenizerError(ModelError):
    """The tokenizer or its chat template is missing or cannot be read."""

    code = "invalid_tokenizer"


class DeviceError(ModelError):
    """The requested device does not exist or cannot run this model."""

    code = "device_unavailable"


class OutOfMemoryError(ModelError):
    """The weights, or the smallest useful KV cache, do not fit."""

    code = "out_of_memory"


# --- one request ---------------------------------------------------------------------------------


class RequestError(NvcliError):
    """One request cannot be served; every other request goes on."""

    exit_code = 1
    http_status = 400
    code = "invalid_request"


class ContextLengthError(RequestError):
    """The prompt does not fit into the context, or into the KV cache."""

    code = "context_length_exceeded"

    @classmethod
    def of_prompt(cls, size: int, limit: int, *, needs_room: bool = True) -> Self | None:
        """What is wrong with a prompt of `size` tokens in a context of `limit`, None where it fits.
        needs_room: an answer follows.
        """
        if size + int(needs_room) <= limit:
            return None
        return cls(
            f"the prompt has {size:,} tokens, the context holds {limit:,}"
            + (" with at least one for the answer" if needs_room else ""),
            hint="Shorten the prompt or raise --max-model-len.",
            param="prompt",
        )


class TemplateError(RequestError):
    """The messages cannot be rendered with the checkpoint's chat template."""

    code = "invalid_messages"


# --- the engine ----------------------------------------------------------------------------------


class EngineError(NvcliError):
    """A step failed; the requests it carried end with an error."""

    code = "engine_error"


class EngineClosedError(EngineError):
    """The engine was closed, or its thread died, before the request ended."""

    http_status = 503
    code = "engine_closed"


def first_line(error: BaseException) -> str:
    """What an exception of somebody else says, cut to fit into one of our messages; its class
    where it says nothing.
    """
    lines = str(error).strip().splitlines()
    return lines[0].strip()[:400] if lines else type(error).__name__


_CLOSE = 0.7  # of difflib: --temprature; --url is not --turns


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Which of the `known` was meant, perhaps: the shortest that begins so, else the most similar.

    None where none is close.
    """
    known = sorted(known, key=lambda other: (len(other), other))
    if len(name) > 1:
        for other in known:
            if other.startswith(name):
                return other
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)), None)


def meant(name: str, known: Iterable[str]) -> str | None:
    """A hint for a name that is none of the `known`, where one of them is close."""
    near = nearest(name, known)
    return None if near is None else f"Did you mean {near!r}?"


# --- ends that are not failures ------------------------------------------------------------------


class InterruptedRunError(NvcliError):
    """SIGINT: the user stopped the run; what was produced is kept."""

    exit_code = 130
    http_status = 499
    code = "interrupted"


class TerminatedRunError(NvcliError):
    """SIGTERM: the run was asked to end; what was produced is flushed."""

    exit_code = 143
    http_status = 503
    code = "terminated"


class HungUpRunError(TerminatedRunError):
    """SIGHUP: the terminal was closed, or the session ended; as SIGTERM."""

    exit_code = 129
    code = "hung_up"


class ClosedPipeError(NvcliError):
    """The reader of standard output closed the pipe; silent by convention."""

    exit_code = 141
    http_status = 499
    code = "closed_pipe"
