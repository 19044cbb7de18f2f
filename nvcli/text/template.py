"""Chat templates are programs that come with a checkpoint: here they run in a sandbox with limits.

The environment is the one that transformers gives a template (trimmed blocks, loop controls, the
generation tag, `tojson` without HTML escapes, `raise_exception`, `strftime_now`), so the text comes
out the same. On top of jinja's immutable sandbox there are three limits. Jinja can loop only in
`for`, recurse only in macros, and grow values only in a few operations, so the template's syntax
tree is given a tick at the start of every loop body and macro, and those operations are checked:

  * steps: ticks in one rendering
  * time: checked at every tick, call and filter
  * size: of the text, and of any one value made by an operator, a call or a filter
"""

from __future__ import annotations

import functools
import json
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from jinja2 import ext, nodes
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from nvcli.errors import TemplateError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.runtime import Context, Macro


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may use before it ends with a `TemplateError`.

    `max_seconds` are the rendering thread's own: what other programs take does not count.
    """

    max_steps: int = 1_000_000
    max_seconds: float = 10.0
    max_characters: int = 32 * 1024 * 1024


class _LimitError(Exception):
    """A limit was passed. Not a jinja error, so that no template construct handles it."""


@dataclass(slots=True)
class _Budget:
    limits: TemplateLimits
    steps: int = 0
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = time.thread_time() + self.limits.max_seconds

    def tick(self) -> None:
        self.steps += 1
        if self.steps > self.limits.max_steps:
            raise _LimitError(f"it took more than {self.limits.max_steps} steps")
        self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise _LimitError(f"it took longer than {self.limits.max_seconds:g} s")

    def check_size(self, size: int) -> None:
        if size > self.limits.max_characters:
            raise _LimitError(f"a value grew over {self.limits.max_characters} characters")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict):
        _budget.get().check_size(len(value))
    return value


def _check_counts(args: Iterable[Any]) -> None:
    """Widths and counts, as in `center(10**9)`, make large values out of small ones."""
    budget = _budget.get()
    for value in args:
        if isinstance(value, int):
            budget.check_size(abs(value))


def _check_replace(text: object, args: tuple[Any, ...]) -> None:
    if isinstance(text, str) and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        _budget.get().check_size(len(text) + text.count(args[0]) * len(args[1]))


def _check_format(text: object) -> None:
    """No run of digits in a format string, as a width or a precision, may pass the size limit."""
    if isinstance(text, str) and any(c in text for c in "%{"):
        digits = "".join(c if c.isdecimal() else " " for c in text)
        if any(len(number) > 7 for number in digits.split()):
            raise _LimitError("a format string asks for too wide a field")


def _bounded_items(items: Iterable[Any]) -> list[Any]:
    """The items of a lazy sequence, as long as their texts together are not too long."""
    budget = _budget.get()
    size = 0
    collected = []
    for item in items:
        size += len(item) if isinstance(item, str) else 1
        budget.check_size(size)
        collected.append(item)
    return collected


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Some filters are handed the environment or a context before the value.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # also copies the mark for functions that want the environment
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _budget.get().check_time()
        value, others = args[first], args[first + 1 :]
        _check_counts((*others, *kwargs.values()))
        if name == "replace":
            _check_replace(value, others)
        elif name == "format":
            _check_format(value)
        elif name in ("join", "list"):
            args = (*args[:first], _bounded_items(value), *others)
        return _checked(function(*args, **kwargs))

    return bounded


class _Limits(ext.Extension):
    """Where the inserted nodes call to."""

    def tick(self) -> str:
        _budget.get().tick()
        return ""

    def concat(self, *values: Any) -> str:
        return cast(str, _checked("".join(map(str, values))))


class _Generation(ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("show"), [], [], body).set_lineno(line)

    def show(self, caller: Macro) -> str:
        return str(caller())


class _Instrument(NodeTransformer):
    """Puts a tick at the start of each loop body and macro, and `~` under the size limit."""

    def __init__(self, limits: ext.Extension) -> None:
        self._limits = limits

    def _with_tick(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.ExprStmt(self._limits.call_method("tick", lineno=node.lineno))
        node.body.insert(0, tick.set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_tick

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._limits.call_method("concat", list(node.nodes), lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Limits, _Generation, ext.loopcontrols],
        )
        self.filters = {n: _bounded_filter(n, f) for n, f in self.filters.items()}
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]  # filler text of any length
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.check_time()
        if operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                budget.check_size(left.bit_length() + right.bit_length())
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str | list | tuple):
                    budget.check_size(len(value) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.check_size(left.bit_length() * abs(right))
        elif operator == "%":
            _check_format(left)
            if (
                isinstance(left, str) and "*" in left
            ):  # `'%*d' % (width, number)` takes a width from the values
                _check_counts(right if isinstance(right, tuple) else ())
        elif operator == "+" and isinstance(left, str | list | tuple):
            budget.check_size(len(left) + (len(right) if hasattr(right, "__len__") else 0))
        return super().call_binop(context, operator, left, right)

    def call(*args: Any, **kwargs: Any) -> Any:
        # The arguments are taken apart here because a template may pass a keyword named `self`.
        environment, context, function = args[:3]
        _budget.get().check_time()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `str.format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        arguments = args[3:]
        if isinstance(owner, str | int):
            values = (*arguments, *kwargs.values())
            if name == "replace":
                _check_replace(owner, arguments)
            elif name == "join" and arguments:
                arguments = (_bounded_items(arguments[0]), *arguments[1:])
            elif name in ("format", "format_map"):
                _check_format(owner)
                if ":{" in str(owner):  # a width taken from the values
                    _check_counts(values)
            else:
                _check_counts(values)
        base = ImmutableSandboxedEnvironment.call
        return _checked(base(environment, context, function, *arguments, **kwargs))


def _raise_exception(message: str) -> None:
    raise JinjaError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _check_counts((indent,))
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return cast(str, _checked(text))


@functools.cache
def _environment() -> _Environment:
    return _Environment()


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    environment = _environment()
    limits = environment.extensions[_Limits.identifier]
    tree = _Instrument(limits).visit(environment.parse(source))
    return environment.from_string(tree)


def check_template(source: str) -> None:
    """Raises `TemplateError` for a source that is no template."""
    try:
        _compile(source)
    except JinjaError as error:
        line = getattr(error, "lineno", None)
        place = f", line {line}" if line else ""
        raise TemplateError(f"chat template{place}: {first_line(error)}") from error
    except Exception as error:  # as deep a nesting as Python's own compiler refuses
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise TemplateError(f"chat template: {reason}") from error


def render_template(
    source: str, variables: Mapping[str, Any], limits: TemplateLimits | None = None
) -> str:
    """The text of a template. Whatever goes wrong in it, a limit included, is a `TemplateError`."""
    budget = _Budget(limits or TemplateLimits())
    token = _budget.set(budget)
    try:
        pieces: list[str] = []
        size = 0
        for piece in _compile(source).generate(variables):
            size += len(piece)
            budget.check_size(size)
            pieces.append(piece)
        return "".join(pieces)
    except _LimitError as error:
        raise TemplateError(f"chat template stopped: {error}") from error
    except JinjaError as error:
        raise TemplateError(f"chat template: {first_line(error)}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise TemplateError(f"chat template failed with {reason}") from error
    finally:
        _budget.reset(token)
