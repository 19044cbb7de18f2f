"""Between the server's process and the engine's: frames over a socket pair.

A frame is its length and a pickle; both ends are this program, over a socket nobody else has.
Outputs cross as tuples, which cost a fraction of what their classes do.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from nvcli.engine.engine import EngineStats
from nvcli.types import FinishReason, RequestOutput, RequestTimes, Usage

if TYPE_CHECKING:
    import socket

_FAULTS = ("error", "abort")  # what came before is told first
_HEAD = struct.Struct("<I")
_STATS = attrgetter(*(field.name for field in fields(EngineStats)))


def encode(value: Any) -> bytes:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


def read_frame(sock: socket.socket) -> Any:
    """The next frame. Raises `EOFError` at the end."""
    (size,) = _HEAD.unpack(_read(sock, _HEAD.size))
    return pickle.loads(_read(sock, size))


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


class FrameReader:
    """Frames out of pieces of any size."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._data += data
        frames = []
        start = 0
        while len(self._data) - start >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._data, start)
            end = start + _HEAD.size + size
            if end > len(self._data):
                break
            frames.append(pickle.loads(memoryview(self._data)[start + _HEAD.size : end]))
            start = end
        del self._data[:start]
        return frames


def pack_stats(stats: EngineStats) -> tuple[int, ...]:
    """For `EngineStats(*...)`. One goes with each frame, so it is no deep copy as `astuple`'s."""
    values: tuple[int, ...] = _STATS(stats)
    return values


def pack_output(output: RequestOutput) -> tuple[Any, ...]:
    usage, times = output.usage, output.times
    rest = None
    if output.finish_reason is not None or output.logprobs is not None or output.tool_calls:
        rest = (
            output.tool_calls,
            output.logprobs,
            output.content_flags,
            None if output.finish_reason is None else str(output.finish_reason),
            output.stop_reason,
            output.pooled,
            None
            if times is None
            else (times.arrival, times.first_scheduled, times.first_token, times.finished),
            output.error,
            output.error_code,
        )
    counts = (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.reasoning_tokens,
    )
    return (
        output.index,
        output.text,
        output.reasoning,
        output.token_ids,
        counts,
        output.prompt_logprobs,
        rest,
    )


def merge_packed(packed: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Join deltas of one request that wait together: whoever is behind sends fewer, longer ones.

    Only plain text joins, and only where the order of the channels stays what it was.
    """
    if len(packed) < 2:
        return packed
    merged: list[tuple[Any, ...]] = []
    last_of: dict[int, int] = {}  # index of the output -> where its last delta stands
    for item in packed:
        index, text, reasoning, token_ids, counts, prompt_logprobs, rest = item
        place = last_of.get(index)
        may_join = rest is None or (rest[1] is None and rest[3] not in _FAULTS)
        if place is not None and prompt_logprobs is None and may_join:
            before = merged[place]
            _, text_before, reasoning_before, ids_before, _, prompt_before, rest_before = before
            if rest_before is None and not (text_before and reasoning):
                if reasoning_before is not None:
                    reasoning = reasoning_before + (reasoning or "")
                joined = (index, text_before + text, reasoning, ids_before + token_ids)
                merged[place] = (*joined, counts, prompt_before, rest)
                continue
        last_of[index] = len(merged)
        merged.append(item)
    return merged


def unpack_output(request_id: str, packed: tuple[Any, ...]) -> RequestOutput:
    index, text, reasoning, token_ids, counts, prompt_logprobs, rest = packed
    if rest is None:
        return RequestOutput(
            request_id=request_id,
            index=index,
            text=text,
            reasoning=reasoning,
            token_ids=token_ids,
            prompt_logprobs=prompt_logprobs,
            usage=Usage(*counts),
        )
    calls, logprobs, flags, finish, stop, pooled, times, error, code = rest
    return RequestOutput(
        request_id=request_id,
        index=index,
        text=text,
        reasoning=reasoning,
        tool_calls=calls,
        token_ids=token_ids,
        logprobs=logprobs,
        content_flags=flags,
        prompt_logprobs=prompt_logprobs,
        pooled=pooled,
        finish_reason=None if finish is None else FinishReason(finish),
        stop_reason=stop,
        usage=Usage(*counts),
        times=None if times is None else RequestTimes(*times),
        error=error,
        error_code=code,
    )
