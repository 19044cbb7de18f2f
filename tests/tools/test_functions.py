"""Python functions as tools: described from their hints, and contained whatever they do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvcli.errors import UsageError
from nvcli.tools import Toolbox
from nvcli.tools.functions import FunctionTools
from tests.waiting import PATIENCE_S

FILE = Path(__file__).parent / "example_tools.py"


@pytest.fixture(scope="module")
def source() -> Iterator[FunctionTools]:
    tools = FunctionTools(FILE)
    yield tools
    tools.close()


@pytest.fixture
def box(source: FunctionTools) -> Toolbox:
    return Toolbox([source], timeout_s=PATIENCE_S, max_characters=1000)


def call(box: Toolbox, tool: str, /, **arguments: object) -> str:
    return box.call(tool, json.dumps(arguments)).text


def test_public_functions_with_hints_and_docstrings_are_tools(box: Toolbox) -> None:
    assert box.names == [
        *("add", "greet", "later", "nothing", "fail", "leave", "crash", "hang", "flood", "noisy")
    ]
    add, greet = box.definitions()[:2]
    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
            },
        },
    }
    assert "second paragraph" in greet["function"]["description"]
    style = greet["function"]["parameters"]["properties"]["style"]
    assert style["enum"] == ["short", "long"]


def test_results_become_text(box: Toolbox) -> None:
    assert call(box, "add", a=2, b=3) == "5"
    assert call(box, "add", a="2") == "3"
    assert json.loads(call(box, "greet", name="Ann")) == {"greeting": "Hi Ann", "style": "short"}
    assert call(box, "later", text="now") == "now"
    assert call(box, "nothing") == "done"
    assert call(box, "noisy") == "quiet"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fail", '{"text": "luck"}', "error: ValueError: no luck"),
        ("leave", "{}", "error: SystemExit: bye"),
        ("crash", "{}", "error: its process ended with code 3"),
        ("add", '{"a": "many"}', "error: ValidationError"),
        ("add", "{}", "error: ValidationError"),
        ("add", '{"c": 1, "a": 1}', "error: "),
        ("add", "{", "error: the arguments are no JSON"),
        ("add", "[1]", "error: the arguments must be a JSON object"),
        ("gone", "{}", "error: there is no tool 'gone'; there are add"),
    ],
)
def test_what_fails_tells_the_model_and_the_next_call_works(
    box: Toolbox, name: str, arguments: str, message: str
) -> None:
    result = box.call(name, arguments)
    assert result.is_error
    assert result.text.startswith(message)
    assert "\n" not in result.text
    assert call(box, "add", a=1) == "2"


def test_what_hangs_is_ended(source: FunctionTools) -> None:
    box = Toolbox([source], timeout_s=0.5)
    result = box.call("hang", "{}")
    assert result.text == "error: it did not answer in 0.5 s and was ended"
    assert call(Toolbox([source]), "add", a=1) == "2"


def test_what_floods_is_cut(box: Toolbox) -> None:
    text = call(box, "flood", count=5_000_000)
    assert text.endswith("\n[4,999,000 more characters were left out]")
    assert len(text) < 1100
    assert "more than 16 MB" in call(box, "flood", count=40_000_000)
    assert call(box, "add", a=1) == "2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("import sys\nsys.exit(3)", "SystemExit"),
        ("import os\nos._exit(3)", "ended with code 3"),
        ("x = 1", "has no tools"),
        ("def f(a: 'Nope') -> str:\n    return ''", "cannot load"),
    ],
)
def test_a_file_that_cannot_be_loaded(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        FunctionTools(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file_and_a_name_twice(tmp_path: Path, source: FunctionTools) -> None:
    with pytest.raises(UsageError, match="there is no file of tools"):
        FunctionTools(tmp_path / "gone.py")
    with pytest.raises(UsageError, match=r"both .* have a tool 'add'"):
        Toolbox([source, source])
