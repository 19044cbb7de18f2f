"""Options that several commands take together: declared once as a dataclass, given as one value.

    @dataclass
    class EngineOptions:
        model: ModelOpt = None
        device: DeviceOpt = None

    @bundled
    def latency(ctx: typer.Context, engine: EngineOptions, repeat: RepeatOpt = 5) -> int: ...

On the command line `latency` has --model, --device and --repeat, in this order.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable


def bundled(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` as Typer is to see it: every parameter that is a dataclass becomes its fields."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    bundles: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if is_dataclass(kind) and isinstance(kind, type):
            bundles[name] = kind
            inner = get_type_hints(kind, include_extras=True)
            parameters += [
                inspect.Parameter(
                    f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=inner[f.name]
                )
                for f in fields(kind)
            ]
        else:
            parameters.append(
                parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
            )

    def run(**values: Any) -> Any:
        for name, kind in bundles.items():
            values[name] = kind(**{f.name: values.pop(f.name) for f in fields(kind)})
        return command(**values)

    run.__name__, run.__doc__, run.__module__ = (
        command.__name__,
        command.__doc__,
        command.__module__,
    )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
