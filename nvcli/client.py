"""A model behind `nvcli serve`, or another server of OpenAI's API, over HTTP or a Unix socket."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from nvcli.errors import ContextLengthError, NvcliError, RequestError, UsageError
from nvcli.text import message_json
from nvcli.types import (
    FinishReason,
    Message,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    ToolCall,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import httpx

CONNECT_TIMEOUT_S = 5.0
DEFAULT_NUM_SEQS = 64  # requests at once to a server that does not say how many it runs
_SENT = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "max_tokens", "seed", "thinking_budget"),
)


class ServerError(NvcliError):
    """The server cannot be reached, or answers what is no answer."""

    code = "server_error"


class ServerModel:
    """`nvcli.repl.model.ChatModel` over HTTP. Raises `ServerError` where there is no server."""

    is_demo = False
    startup = None

    def __init__(
        self, url: str, *, uds: str | None = None, model: str | None = None, key: str | None = None
    ) -> None:
        """`model`: one of those the server has; None: its first."""
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        self._uds, self._key = uds, key
        self.where = f"the socket {uds}" if uds is not None else self.url
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http: httpx.Client = httpx.Client(
            base_url=self.url,
            transport=httpx.HTTPTransport(uds=uds) if uds is not None else None,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        )
        try:
            found = self._find_model(model)
        except BaseException:
            self._http.close()
            raise
        self.model_name: str = found["id"]
        self.max_model_len: int = found.get("max_model_len") or 32768
        self.max_num_seqs: int = found.get("max_num_seqs") or DEFAULT_NUM_SEQS
        self.root: str = found.get("root") or found["id"]  # the model by its own name
        self.supports_thinking: bool = found.get("supports_thinking", True)
        self._defaults: dict[str, dict[str, Any]] = found.get("default_sampling") or {}

    def _find_model(self, name: str | None) -> dict[str, Any]:
        """What the server says of its model `name`, or of its first."""
        try:
            models: list[dict[str, Any]] = self._request("/v1/models")["data"]
            known = {m["id"]: m for m in models}
            roots = {m.get("root"): m for m in models}
            found = models[0] if name is None else known.get(name) or roots.get(name)
        except (LookupError, TypeError, AttributeError) as exc:
            raise ServerError(f"{self.where} is no server of OpenAI's API") from exc
        if found is None:
            raise UsageError(
                f"{self.where} does not serve {name}", hint=f"It has {', '.join(known)}."
            )
        return found

    # --- ChatModel -------------------------------------------------------------------------------

    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams:
        mode = "thinking" if enable_thinking and self.supports_thinking else "plain"
        values = dict(self._defaults.get(mode) or {})
        values.update({k: v for k, v in overrides.items() if v is not None})
        return SamplingParams(**values)

    def render(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        body: dict[str, Any] = {
            "model": self.model_name,
            "messages": [message_json(message) for message in messages],
            "chat_template_kwargs": {"enable_thinking": enable_thinking},
        }
        if tools:
            body["tools"] = list(tools)
        ids = self._request("/tokenize", body)["tokens"]
        return str(self._request("/detokenize", {"tokens": ids})["prompt"])

    def count_tokens(self, text: str) -> int:
        return int(self._request("/tokenize", {"prompt": text})["count"])

    def stats(self) -> None:
        """A server's engine is its own."""

    def stream(
        self,
        prompt: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool = True,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Raises `RequestError` for what the server refuses, `ServerError` when it goes away."""
        params = params or self.sampling(enable_thinking=enable_thinking)
        body: dict[str, Any] = {
            "model": self.model_name,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: getattr(params, name) for name in _SENT},
        }
        body = {name: value for name, value in body.items() if value is not None}
        if params.stop:
            body["stop"] = list(params.stop)
        if raw:
            body.pop("thinking_budget", None)
            if isinstance(prompt, str) and "max_tokens" not in body:  # the API's default is 16
                body["max_tokens"] = max(self.max_model_len - self.count_tokens(prompt), 1)
            return self._events("/v1/completions", {**body, "prompt": prompt})
        if isinstance(prompt, str):
            prompt = [Message("user", prompt)]
        body["messages"] = [message_json(message) for message in prompt]
        body["chat_template_kwargs"] = {"enable_thinking": enable_thinking}
        if tools:
            body["tools"] = list(tools)
        if schema is not None:
            shape = {"name": "answer", "schema": dict(schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
        return self._events("/v1/chat/completions", body)

    def close(self) -> None:
        self._http.close()

    def async_client(self) -> httpx.AsyncClient:
        """For many requests at once to the same server, as the same user."""
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self.url,
            transport=httpx.AsyncHTTPTransport(uds=self._uds, limits=limits),
            headers=self._http.headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        )

    def with_model(self, name: str) -> ServerModel | None:
        """Another model of the same server; None where it has none of that name."""
        try:
            return ServerModel(self.url, uds=self._uds, model=name, key=self._key)
        except NvcliError:
            return None

    # --- HTTP ------------------------------------------------------------------------------------

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[RequestOutput]:
        """The stream's chunks as deltas; the last one carries the end, usage and times."""
        import httpx

        reader = _ChunkReader()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        break
                    delta = reader.read(json.loads(data))
                    if delta is not None:
                        yield delta
            yield reader.end()
        except httpx.HTTPError as exc:
            raise self._lost(exc) from exc
        except (ValueError, KeyError, TypeError, IndexError) as exc:
            raise ServerError(f"{self.where} answered what is no stream of OpenAI's API") from exc

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that a GET, or a POST of `body`, is answered with."""
        import httpx

        try:
            response = self._http.request("GET" if body is None else "POST", path, json=body)
            if response.status_code != 200:
                raise _refusal(response)
            return response.json()
        except httpx.HTTPError as exc:
            raise self._lost(exc) from exc
        except ValueError as exc:
            raise ServerError(f"{self.where} is no server of OpenAI's API") from exc

    def _lost(self, exc: Exception) -> ServerError:
        reason = " ".join(str(exc).split()) or type(exc).__name__
        return ServerError(
            f"cannot reach {self.where}: {reason}", hint="Start nvcli serve, or use --attach never."
        )


class _ChunkReader:
    """Chunks of one streamed answer, as `RequestOutput` deltas."""

    def __init__(self) -> None:
        self._arrival = time.monotonic()
        self._first: float | None = None
        self._num_tokens = 0
        self._num_reasoning = 0
        self._finish: FinishReason | None = None
        self._usage = Usage()

    def read(self, chunk: dict[str, Any]) -> RequestOutput | None:
        if "error" in chunk:
            raise RequestError(str(chunk["error"].get("message", "the request failed")))
        if chunk.get("usage"):
            self._usage = read_usage(chunk["usage"])
        if not chunk.get("choices"):
            return None
        choice = chunk["choices"][0]
        delta = choice.get("delta") or {"content": choice.get("text")}
        if choice.get("finish_reason"):
            self._finish = FinishReason(choice["finish_reason"])
        text = delta.get("content") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        calls = tuple(_call(call) for call in delta.get("tool_calls") or ())
        if not (text or reasoning or calls):
            return None
        self._first = self._first or time.monotonic()
        self._num_tokens += 1
        self._num_reasoning += bool(reasoning)
        usage = Usage(0, self._num_tokens, 0, self._num_reasoning)  # until the server says
        return RequestOutput(
            request_id="server", text=text, reasoning=reasoning, tool_calls=calls, usage=usage
        )

    def end(self) -> RequestOutput:
        if self._finish is None:
            raise RequestError("the server ended the stream before the answer")
        return RequestOutput(
            request_id="server",
            finish_reason=self._finish,
            usage=self._usage,
            times=RequestTimes(self._arrival, None, self._first, time.monotonic()),
        )


def read_usage(value: dict[str, Any]) -> Usage:
    """Of a chat or completion, or of a response, which has other names for the same."""
    prompt = value.get("prompt_tokens_details") or value.get("input_tokens_details") or {}
    details = value.get("completion_tokens_details") or value.get("output_tokens_details") or {}
    return Usage(
        prompt_tokens=value.get("prompt_tokens") or value.get("input_tokens") or 0,
        completion_tokens=value.get("completion_tokens") or value.get("output_tokens") or 0,
        cached_tokens=prompt.get("cached_tokens") or 0,
        reasoning_tokens=details.get("reasoning_tokens") or 0,
    )


def _call(value: dict[str, Any]) -> ToolCall:
    function = value.get("function") or {}
    return ToolCall(
        value["index"],
        value.get("id") or "",
        function.get("name") or "",
        function.get("arguments") or "",
    )


def _refusal(response: httpx.Response) -> NvcliError:
    message, code = f"the server answered {response.status_code}", ""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        error = response.json()["error"]
        message, code = str(error["message"]), str(error.get("code") or "")
    message = message.rstrip(".")
    if code == ContextLengthError.code:
        return ContextLengthError(message)
    hint = "Set NVCLI_API_KEY." if response.status_code == 401 else None
    return RequestError(message, hint=hint)
