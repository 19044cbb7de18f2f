"""`nvcli doctor`: what is here, what is missing, and whether a model fits before it is loaded."""

from __future__ import annotations

import typer  # noqa: TC002 - Typer reads the annotations

from nvcli.cli import engine_options, options  # noqa: TC001 - Typer reads the annotations of `doctor`
from nvcli.cli.checks import Check, State, run_checks
from nvcli.cli.command import settings_of
from nvcli.cli.console import dump_json, print_text
from nvcli.config import DEFAULT_MODEL, EngineConfig
from nvcli.errors import NvcliError
from nvcli.repl.screen import visible
from nvcli.repl.wrap import wrap

_SIGNS = {State.OK: "ok", State.NOTE: "-", State.WARN: "warn", State.FAIL: "FAIL"}
_COLORS = {State.OK: "32", State.NOTE: "2", State.WARN: "33", State.FAIL: "31"}

EXAMPLES = """\
nvcli doctor                                        this machine and the built-in model
nvcli doctor -m Qwen/Qwen3-8B --max-model-len 32k   does it fit?
nvcli doctor --json | jq '.checks[] | select(.state == "fail")'"""


def doctor(
    ctx: typer.Context,
    model: engine_options.ModelOpt = None,
    device: engine_options.DeviceOpt = None,
    dtype: engine_options.DTypeOpt = None,
    max_model_len: engine_options.MaxModelLenOpt = None,
    gpu_memory_utilization: engine_options.MemoryOpt = None,
    kv_cache_dtype: engine_options.KVCacheDTypeOpt = None,
    attention_backend: engine_options.AttentionBackendOpt = None,
    block_size: engine_options.BlockSizeOpt = None,
    json: options.DoctorJsonOpt = False,
) -> None:
    """Look at driver, GPU, model, memory and terminal; exit 1 when something blocks."""
    config = EngineConfig.from_options(
        model=DEFAULT_MODEL if model is None else model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        attention_backend=attention_backend,
        block_size=block_size,
    )
    screen = settings_of(ctx).screen()
    found: list[Check] = []
    for check in run_checks(config):
        found.append(check)
        if not json:
            sign = f"{_SIGNS[check.state]:<4}"
            hint = f". {check.hint}" if check.hint else ""
            line = f"{sign}  {check.name:<12} {visible(check.text + hint)}"
            if screen.out_is_terminal:
                line = wrap(line, screen.size()[0], indent=6)
            if screen.out_color:
                line = f"\x1b[{_COLORS[check.state]}m{sign}\x1b[0m{line[len(sign) :]}"
            print_text(line)
    blocking = [check for check in found if check.state is State.FAIL]
    if json:
        rows = [
            {"name": c.name, "state": c.state.value, "text": c.text, "hint": c.hint} for c in found
        ]
        print_text(dump_json({"ok": not blocking, "model": config.model, "checks": rows}))
    if blocking:
        names = ", ".join(check.name for check in blocking)
        raise NvcliError(f"{len(blocking)} of {len(found)} checks failed: {names}")
