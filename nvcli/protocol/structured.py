"""What an output must look like: `response_format`, `structured_outputs` and forced tool calls.

All of them become one llguidance grammar (`GrammarSpec`), a list of named parts of which the first
is the start. A call is `<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>` with the
arguments after the tool's schema; where a call may but need not come, the rest is free text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.engine.grammar import MAX_SOURCE, GrammarSpec
from nvcli.protocol.fields import UnsupportedFieldError

if TYPE_CHECKING:
    from nvcli.protocol.fields import Fields
    from nvcli.protocol.tools import Tools
    from nvcli.text import Tokenizer

MAX_CALLS = 32  # in a row, where the grammar decides
MAX_CHOICES = 1024
_WHITESPACE = r"[ \n]{0,40}"  # between the parts of a JSON text; a model may not go on for ever
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
STRUCTURED_FIELDS = ("structured_outputs", *_GUIDED)
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class Structure:
    """One part of a grammar: a JSON schema, or a Lark grammar; `param` is where it came from."""

    part: dict[str, Any]
    param: str


def read_structure(fields: Fields) -> Structure | None:
    """The structure a request asks for. Raises `InvalidParameterError` naming the field."""
    found = [
        structure
        for structure in (
            _response_format(fields),
            _structured_outputs(fields),
            *(_guided(fields, name) for name in _GUIDED),
        )
        if structure is not None
    ]
    if len(found) > 1:
        fields.fail(found[1].param, f"cannot be given beside {found[0].param}")
    return found[0] if found else None


def json_structure(schema: Any, param: str, *, is_lenient: bool = False) -> Structure:
    return Structure({"json_schema": _with_options(schema, is_lenient=is_lenient)}, param)


def read_format(given: Fields, param: str) -> Structure | None:
    """`response_format`, or `text.format` of Responses, whose schema stands one level higher."""
    kind = given.text("type")
    if kind == "json_object":
        return json_structure({"type": "object"}, param)
    if kind == "json_schema":
        inner = given if given.has("schema") else given.object("json_schema")
        if inner is None:
            given.fail("json_schema", "is missing")
        if not inner.text("name"):
            inner.fail("name", "is missing")
        inner.text("description")
        is_strict = inner.flag("strict") or False
        schema = inner.get("schema")
        if not isinstance(schema, dict | bool):
            inner.fail("schema", "must be a JSON schema, an object")
        return json_structure(schema, inner.name("schema"), is_lenient=not is_strict)
    if kind == "structural_tag":
        given.refuse("type", "structural_tag is not supported; use tools or a grammar")
    if kind != "text":
        given.fail("type", "must be one of text, json_object, json_schema")
    return None


def _response_format(fields: Fields) -> Structure | None:
    given = fields.object("response_format")
    return None if given is None else read_format(given, "response_format")


def _structured_outputs(fields: Fields) -> Structure | None:
    given = fields.object("structured_outputs")
    if given is None:
        return None
    kinds = [kind for kind in _KINDS if given.get(kind) not in (None, False)]
    if len(kinds) != 1:
        fields.fail("structured_outputs", f"must hold one of {', '.join(_KINDS)}")
    (kind,) = kinds
    if kind == "structural_tag":
        given.refuse(kind, "is not supported; use tools or a grammar")
    if kind == "json_object":
        return json_structure({"type": "object"}, given.name(kind))
    return _of_kind(given, kind, kind)


def _guided(fields: Fields, name: str) -> Structure | None:
    if fields.get(name) is None:
        return None
    return _of_kind(fields, name, name.removeprefix("guided_"))


def _of_kind(fields: Fields, name: str, kind: str) -> Structure:
    param = fields.name(name)
    if kind == "json":
        value = fields.get(name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                fields.fail(name, "must be a JSON schema")
        if not isinstance(value, dict | bool):
            fields.fail(name, "must be a JSON schema, an object")
        return json_structure(value, param, is_lenient=True)
    if kind == "choice":
        choices = fields.texts(name) or ()
        if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
            fields.fail(name, f"must hold from 1 to {MAX_CHOICES} texts that are not empty")
        lark = "start: " + " | ".join(map(_literal, choices))
        return Structure({"lark_grammar": lark}, param)
    text = fields.text(name)
    if not text:
        fields.fail(name, "must not be empty")
    if kind == "regex":
        return Structure({"lark_grammar": f"start: {_regex(text)}"}, param)
    if "::=" in text:
        if len(text) > MAX_SOURCE:  # the converter is slow, and nobody else runs meanwhile
            fields.fail(name, f"has {len(text):,} characters, at most {MAX_SOURCE:,}")
        from llguidance import gbnf_to_lark

        try:
            text = str(gbnf_to_lark.gbnf_to_lark(text))
        except RecursionError:
            fields.fail(name, "is nested too deep")
        except Exception as error:  # noqa: BLE001 - whatever the converter trips over is the text's
            fields.fail(name, f"is no GBNF grammar: {' '.join(str(error).split())[:300]}")
    return Structure({"lark_grammar": text}, param)


# --- one grammar ---------------------------------------------------------------------------------


def grammar_spec(
    structure: Structure | None, tools: Tools, tokenizer: Tokenizer | None
) -> GrammarSpec | None:
    """The grammar of a request; None where the output is free. A model without tool-call tokens
    answers in plain text, and then only `structure` counts; a forced call is refused."""
    tags = None
    if tools.is_active and tokenizer is not None:
        start, end = tokenizer.tool_call_id, tokenizer.end_tool_call_id
        tags = None if start is None or end is None else (start, end)
    if tags is None:
        if tools.is_forced:
            raise UnsupportedFieldError(
                "tool_choice: the model has no tokens for tool calls, so none can be forced",
                param="tool_choice",
            )
        if structure is None:
            return None
        return _spec([{"name": "start", **structure.part}], structure.param)
    rules, parts = _calls(tools, tags)
    may_repeat = f'("\\n" call){{0,{MAX_CALLS - 1}}}' if tools.is_parallel else ""
    is_required = True
    if tools.is_forced:
        start_rule = f"start: call {may_repeat}"
    elif structure is not None:
        start_rule = f"start: call {may_repeat} | @answer"
        parts.append({"name": "answer", **structure.part})
    else:
        is_required = False
        calls = "(call TEXT?)*" if tools.is_parallel else "call?"
        start_rule = f"start: TEXT? {calls}\nTEXT: /(.|\\n)+/"
    lark = "\n".join([start_rule, *rules])
    param = structure.param if structure is not None and not tools.is_forced else "tools"
    return _spec([{"name": "start", "lark_grammar": lark}, *parts], param, is_required=is_required)


def _calls(tools: Tools, tags: tuple[int, int]) -> tuple[list[str], list[dict[str, Any]]]:
    """The rules of a call, and a part for the arguments of each tool that may be called."""
    names: list[str] = []
    rules: list[str] = []
    parts: list[dict[str, Any]] = []
    for number, tool in enumerate(tools.callable_definitions):
        function = tool["function"]
        names.append(f"fn{number}")
        head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        rules.append(f'fn{number}: {_literal(head)} @args{number} "}}"')
        schema = function.get("parameters")
        if not schema:
            schema = {"properties": {}, "additionalProperties": False}
        is_strict = function.get("strict") is True
        schema = _with_options({"type": "object", **schema}, is_lenient=not is_strict)
        parts.append({"name": f"args{number}", "json_schema": schema})
    start, end = tags
    call = f'call: <[{start}]> "\\n" fn "\\n" <[{end}]>'
    return [call, f"fn: {' | '.join(names)}", *rules], parts


def _spec(parts: list[dict[str, Any]], param: str, *, is_required: bool = True) -> GrammarSpec:
    source = json.dumps({"grammars": parts}, ensure_ascii=False)
    return GrammarSpec(source, is_required, param)


def _with_options(schema: Any, *, is_lenient: bool) -> Any:
    """`is_lenient`: keywords that cannot be enforced are left out of account, not errors."""
    if not isinstance(schema, dict):
        return schema
    options = {"whitespace_pattern": _WHITESPACE, "lenient": is_lenient}
    return {**schema, "x-guidance": options}


def _literal(text: str) -> str:
    """A string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    """A regex of a Lark grammar: a slash in it is escaped."""
    escaped, is_escape = [], False
    for character in text:
        if character == "/" and not is_escape:
            escaped.append("\\/")
        elif character == "\n":
            escaped.append("\\n")
        else:
            escaped.append(character)
        is_escape = character == "\\" and not is_escape
    return f"/{''.join(escaped)}/"
