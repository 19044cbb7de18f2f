"""The `nvcli` command: the root with all its commands, and `main`, where every error becomes one
line.
"""

from __future__ import annotations

import errno
import functools
import logging
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

import typer

from nvcli import __version__
from nvcli.cli import batch, bench, chat, completion, doctor, models, options, serve, tokens
from nvcli.cli.command import CONTEXT, ClickUsageError, Command, Group, Settings, settings_of
from nvcli.cli.complaints import usage_error
from nvcli.cli.console import ColorMode, hold_closed_streams, print_text, report, silence
from nvcli.cli.interrupts import end_on_signals, interrupts_never_lost
from nvcli.errors import ClosedPipeError, InterruptedRunError, NvcliError, UsageError
from nvcli.logs import log_said
from nvcli.repl.screen import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLES = """\
nvcli chat                                  talk with the built-in model
nvcli chat "Why is the sky blue?"           one answer
git diff | nvcli chat "Write the message"   read a pipe, answer on standard output
nvcli chat -m Qwen/Qwen3-0.6B               another model: a Hugging Face id or a folder"""


app = typer.Typer(
    cls=Group,
    epilog=EXAMPLES,
    name="nvcli",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={**CONTEXT, "auto_envvar_prefix": "NVCLI"},
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: options.VersionOpt = False,
    quiet: options.QuietOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = ColorMode.AUTO,
    log_file: options.LogFileOpt = None,
    debug: options.DebugOpt = False,
    config: options.ConfigOpt = None,
    profile: options.ProfileOpt = None,
    show_config: options.ShowConfigOpt = False,
) -> None:
    """An LLM engine you use from the terminal: Qwen3 on NVIDIA GPUs and on the CPU."""
    settings_of(ctx).take(ctx)
    if version:
        print_text(f"nvcli {__version__}")
        raise typer.Exit
    if show_config:
        raise UsageError(
            "--show-config goes after a command's name", hint="Try 'nvcli chat --show-config'."
        )
    if ctx.invoked_subcommand is None:
        print_text(ctx.get_help())


@functools.cache
def command_line() -> Any:
    """The root with all its commands."""
    app.command(cls=chat.ChatCommand, epilog=chat.EXAMPLES)(chat.chat)
    app.command(cls=Command, epilog=batch.EXAMPLES)(batch.batch)
    app.command("batch-generate", cls=Command, epilog=batch.EXAMPLES, hidden=True)(batch.batch)
    app.command(cls=Command, epilog=serve.EXAMPLES)(serve.serve)
    app.add_typer(bench.bench_app, name="bench")
    app.add_typer(models.models)
    app.command(cls=Command, epilog=tokens.EXAMPLES)(tokens.tokens)
    app.command(cls=Command, epilog=doctor.EXAMPLES)(doctor.doctor)
    app.command(cls=Command, epilog=completion.EXAMPLES)(completion.completion)
    return typer.main.get_command(app)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing but the code leaves it."""
    settings = Settings()
    hold_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a C locale cannot hold every answer
    end_on_signals()
    for name in ("SIGUSR1", "SIGINFO"):  # a question that is asked too early or too late
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda signum, frame: None)
    try:
        with interrupts_never_lost():
            code = _run(list(sys.argv[1:] if args is None else args), settings)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        code = 141
    except OSError as exc:
        code = _report(_io_error(exc), settings)
    finally:
        silence(sys.stdout, sys.stderr)
    return code


def _run(args: list[str], settings: Settings) -> int:
    try:
        result = command_line().main(
            args=args, prog_name="nvcli", standalone_mode=False, obj=settings
        )
        if result == InterruptedRunError.exit_code:  # Typer's word for Ctrl+C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except ClosedPipeError as exc:
        return exc.exit_code
    except NvcliError as exc:
        return _report(exc, settings)
    except (KeyboardInterrupt, typer.Abort):
        return _report(InterruptedRunError("interrupted"), settings)
    except ClickUsageError as exc:
        return _report(usage_error(exc, command_line()), settings)
    except SystemExit as exc:
        if isinstance(exc.__context__, OSError) and exc.__context__.errno == errno.EPIPE:
            return ClosedPipeError.exit_code  # Typer turned a closed pipe into exit 1
        return exc.code if isinstance(exc.code, int) else 1
    except BrokenPipeError:
        return ClosedPipeError.exit_code
    except OSError as exc:
        return _report(_io_error(exc), settings)
    except MemoryError:
        return _report(
            NvcliError("there is not enough memory, or ulimit allows too little"), settings
        )
    except Exception as exc:  # the last resort, promised to users as one line
        reason = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        hint = "This is a bug; --debug shows where."
        logging.getLogger("nvcli").debug("unexpected error", exc_info=True)
        return _report(NvcliError(f"unexpected error: {reason}", hint=hint), settings)


def _report(error: NvcliError, settings: Settings) -> int:
    if settings.debug:
        traceback.print_exc()
    report(error)
    log_said(visible(str(error)), logging.ERROR)
    return error.exit_code


def _io_error(exc: OSError) -> NvcliError:
    """Help and version pages are written without our own checks; files name themselves."""
    reason = exc.strerror or str(exc)
    if exc.filename is not None:
        return NvcliError(f"{exc.filename}: {reason}")
    return NvcliError(f"cannot write to standard output: {reason}")
