"""Which switch says whether the model thinks, where a request names several.

Most specific first: `chat_template_kwargs.enable_thinking`, `enable_thinking`, `thinking`,
`reasoning`, `reasoning_effort`; then the server's or the run's default. The first three must not
contradict each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.text.tokenizer import OWN_VARIABLES

if TYPE_CHECKING:
    from nvcli.protocol.fields import Fields

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
BUDGETS = {"minimal": 512, "low": 1024, "medium": 8192}  # tokens; higher efforts are not limited

THINKING_FIELDS = (
    "chat_template_kwargs",
    "enable_thinking",
    "thinking",
    "thinking_budget",
    "thinking_token_budget",
    "reasoning",
    "reasoning_effort",
    "include_reasoning",
)


@dataclass(frozen=True, slots=True)
class Thinking:
    """`enabled` None: the request leaves it open. `budget`: reasoning tokens, None for no limit."""

    enabled: bool | None = None
    budget: int | None = None
    is_shown: bool = True


def read_thinking(fields: Fields) -> tuple[Thinking, dict[str, Any]]:
    """The thinking state a request asks for, and its other template variables."""
    kwargs = fields.inner("chat_template_kwargs")
    variables = dict(kwargs.raw)
    variables.pop("enable_thinking", None)
    for name in OWN_VARIABLES.intersection(variables):
        kwargs.fail(name, "cannot be set as a template variable")
    switches: list[tuple[str, bool]] = []
    _add(switches, "chat_template_kwargs.enable_thinking", kwargs.flag("enable_thinking"))
    _add(switches, "enable_thinking", fields.flag("enable_thinking"))
    thinking_enabled, budget = _thinking(fields)
    _add(switches, "thinking", thinking_enabled)
    for name, value in switches[1:]:
        if value != switches[0][1]:
            fields.fail(name, f"contradicts {switches[0][0]}")
    enabled, effort, is_shown = _reasoning(fields)
    _add(switches, "reasoning", enabled)
    flat_effort = fields.choice("reasoning_effort", EFFORTS)
    effort = effort or flat_effort
    if effort is not None:
        _add(switches, "reasoning_effort", effort != "none")
    for name in ("thinking_budget", "thinking_token_budget"):
        given = fields.integer(name, 0)
        budget = given if budget is None else budget
    if budget is None and effort is not None:
        budget = BUDGETS.get(effort)
    is_on = switches[0][1] if switches else None
    if is_on is False:
        budget = None
    return Thinking(is_on, budget, is_shown), variables


def _add(switches: list[tuple[str, bool]], name: str, value: bool | None) -> None:
    if value is not None:
        switches.append((name, value))


def _thinking(fields: Fields) -> tuple[bool | None, int | None]:
    value = fields.get("thinking")
    if value is None or isinstance(value, bool):
        return value, None
    given = fields.inner("thinking")
    kind = given.choice("type", ("enabled", "disabled", "adaptive", "auto"))
    enabled = None if kind in (None, "adaptive", "auto") else kind == "enabled"
    return enabled, given.integer("budget_tokens", 0)


def _reasoning(fields: Fields) -> tuple[bool | None, str | None, bool]:
    is_shown = fields.flag("include_reasoning") is not False
    given = fields.inner("reasoning")
    if given.flag("exclude"):
        is_shown = False
    return given.flag("enabled"), given.choice("effort", EFFORTS), is_shown
