"""A training sample and its text, exactly as Qwen3's chat template writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
END = "<|im_end|>"

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


@dataclass(slots=True)
class Sample:
    """A conversation up to a user's turn or a tool's result, and the answer to it.

    ``check`` says how an answer is judged: "exact" (the same text), "json" (the same value),
    "calls" (the same tool calls), "contains" (every part of ``expected`` split at "|", any case),
    "starts" (it begins with ``answer``) or "story".

    ``given`` is the beginning of the answer that a grammar has written, as under ``--schema``:
    the prompt ends with it, after the thought. With ``cut``, ``answer`` is one value of a longer
    text and does not end it.
    """

    kind: str
    messages: list[Message]
    answer: str = ""
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    check: str = "exact"
    expected: str = ""
    thinking: bool = False
    switched_off: bool = False  # the user wrote /no_think: the model writes an empty block itself
    given: str = ""
    cut: bool = False

    def prompt(self) -> str:
        text = render(self.messages, self.tools) + "<|im_start|>assistant\n"
        if not self.thinking:
            return f"{text}<think>\n\n</think>\n\n{self.given}"
        return text + self._thinking() + self.given if self.given else text

    def completion(self) -> str:
        body = self.answer + _calls(self.calls, bool(self.answer)) + ("" if self.cut else END)
        return self._thinking() + body if self.thinking and not self.given else body

    def _thinking(self) -> str:
        return f"<think>\n{'' if self.switched_off else self.thought}\n</think>\n\n"


def one(kind: str, question: str, answer: str, thought: str, **extra: Any) -> Sample:
    """A sample of one question and its answer."""
    return Sample(kind, [{"role": "user", "content": question}], answer, thought, **extra)


def _calls(calls: list[dict[str, Any]], after_text: bool) -> str:
    text = ""
    for index, call in enumerate(calls):
        newline = "\n" if index or after_text else ""
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        text += (
            f'{newline}<tool_call>\n{{"name": "{call["name"]}", "arguments": {arguments}}}\n'
            "</tool_call>"
        )
    return text


def render(messages: list[Message], tools: list[dict[str, Any]]) -> str:
    """The conversation without the generation prompt. Thoughts are kept only where the template
    keeps them: in tool calls after the user's last turn."""
    out: list[str] = []
    first = messages[0]
    if tools:
        out.append("<|im_start|>system\n")
        if first["role"] == "system":
            out.append(first["content"] + "\n\n")
        out.append(_TOOLS_HEAD)
        out.extend(["\n" + json.dumps(tool, ensure_ascii=False) for tool in tools])
        out.append(_TOOLS_TAIL + END + "\n")
    elif first["role"] == "system":
        out.append(f"<|im_start|>system\n{first['content']}{END}\n")
    last = len(messages) - 1
    last_user = max(index for index, message in enumerate(messages) if message["role"] == "user")
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "user" or (role == "system" and index):
            out.append(f"<|im_start|>{role}\n{message['content']}{END}\n")
        elif role == "assistant":
            content = message["content"]
            calls = _calls(message.get("tool_calls", []), bool(content))
            thought = message.get("reasoning_content", "") if index > last_user else ""
            block = f"<think>\n{thought}\n</think>\n\n" if thought else ""
            out.append(f"<|im_start|>assistant\n{block}{content}{calls}{END}\n")
        elif role == "tool":
            if index == 0 or messages[index - 1]["role"] != "tool":
                out.append("<|im_start|>user")
            out.append(f"\n<tool_response>\n{message['content']}\n</tool_response>")
            if index == last or messages[index + 1]["role"] != "tool":
                out.append(END + "\n")
    return "".join(out)
