"""The fast renderer writes what Qwen3's chat template writes, for every kind of sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
from nvdemo.mix import MIX, Task, conversation

if TYPE_CHECKING:
    from nvdemo.chat import Sample

DEMO = Path(__file__).parents[2] / "nvcli" / "demo"


@pytest.fixture(scope="module")
def template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    config = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    return environment.from_string(config["chat_template"])


def final_turn(sample: Sample) -> dict[str, Any]:
    thought = sample.thought if sample.thinking and not sample.switched_off else ""
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": sample.given + sample.answer,
        "reasoning_content": thought,
    }
    return {**turn, "tool_calls": sample.calls} if sample.calls else turn


@pytest.mark.parametrize("task", [task for task, _ in MIX], ids=lambda task: task.__name__)
def test_render_equals_template(task: Task, template: jinja2.Template) -> None:
    for index in range(25):
        sample = conversation(11, index, task)
        tools = sample.tools or None
        prompt = template.render(
            messages=sample.messages,
            tools=tools,
            add_generation_prompt=True,
            enable_thinking=sample.thinking,
        )
        assert sample.prompt().startswith(prompt)
        assert sample.given or sample.prompt() == prompt
        whole = template.render(messages=[*sample.messages, final_turn(sample)], tools=tools)
        end = "<|im_end|>\n" if sample.cut else "\n"
        assert sample.prompt() + sample.completion() + end == whole
