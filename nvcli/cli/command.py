"""What every command of `nvcli` is: it takes the global options too, reads the configuration files,
and has a help page of a fixed layout, in plain text (headings bold on a terminal): what Typer draws
with Rich puts escapes into pipes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from nvcli import __version__
from nvcli.cli import declare
from nvcli.cli.complaints import FILES, VARIABLES, name_flag
from nvcli.cli.console import ColorMode, make_screen, print_lines
from nvcli.cli.environment import check_variables, more_flags, unknown_variables, variable_of
from nvcli.cli.overwrites import check_overwrites
from nvcli.errors import UsageError, meant
from nvcli.logs import configure_logging, log_said
from nvcli.repl.screen import visible

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from nvcli.repl.screen import Screen

ClickUsageError: type[Exception] = typer.BadParameter.__bases__[0]
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 96}
_GLOBALS = ("quiet", "verbose", "color", "log_file", "debug", "config", "profile")
_FROM_USER = ("COMMANDLINE", "ENVIRONMENT")


@dataclass
class Settings:
    """The global options, from before or after the command's name."""

    quiet: bool = False
    verbose: int = 0
    color: ColorMode = ColorMode.AUTO
    log_file: Path | None = None
    debug: bool = False
    config: Path | None = None
    profile: str | None = None
    given: dict[str, str] = field(default_factory=dict)
    """Names that a flag or the environment has set, with where: a file does not change them."""

    def take(self, ctx: Any) -> None:
        """Take the values that were given in `ctx`; the one after the command's name wins."""
        for name in _GLOBALS:
            source = ctx.get_parameter_source(name)
            if source is None or name not in ctx.params:
                continue
            is_from_user = source.name in _FROM_USER
            if is_from_user or (source.name == "DEFAULT_MAP" and name not in self.given):
                setattr(self, name, ctx.params[name])
            if is_from_user:
                param = next(p for p in ctx.command.get_params(ctx) if p.name == name)
                is_flag = source.name == "COMMANDLINE"
                origin = "flag" if is_flag else f"environment, {variable_of(param, ctx)}"
                self.given[name] = origin

    def screen(self) -> Screen:
        return make_screen(self.color, is_quiet=self.quiet, is_verbose=self.verbose > 0)

    def start_logging(self) -> None:
        configure_logging(-1 if self.quiet else self.verbose, self.log_file)


def settings_of(ctx: typer.Context) -> Settings:
    """The run's settings; they live in the root context."""
    return ctx.ensure_object(Settings)


def typed_names(ctx: typer.Context) -> list[str]:
    """The parameters that stand on the command line, by their names in the code."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return [name for name, s in sources.items() if s is not None and s.name == "COMMANDLINE"]


def refuse_in_dry_run(ctx: typer.Context, names: Collection[str]) -> None:
    """Raises `UsageError` for one of these parameters on the command line: a dry run would do
    nothing with it. From a file or the environment it stands for other runs, and is let be."""
    typed = set(typed_names(ctx)).intersection(names)
    for param in ctx.command.params:
        if param.name in typed:
            other = next(name for name in param.opts if name.startswith("--"))
            raise UsageError(f"--dry-run and {other} contradict each other", hint="Leave one out.")


class HelpPages:
    """What groups and commands share: the layout of their help page."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first paragraph, whole: it is broken between words, not cut."""
        help_text: str = self.help or ""  # type: ignore[attr-defined]
        return " ".join(help_text.partition("\n\n")[0].split())

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Typer's newer versions put a name that must be given in braces."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.removeprefix("{").removesuffix("}") for piece in pieces]

    def get_help(self, ctx: Any) -> str:
        text: str = super().get_help(ctx)  # type: ignore[misc]
        if not settings_of(ctx).screen().out_color:
            return text
        return "\n".join(f"\x1b[1m{s}\x1b[0m" if _is_heading(s) else s for s in text.split("\n"))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            record = param.get_help_record(ctx)
            if record is None:
                continue
            title = getattr(param, "rich_help_panel", None) or declare.GLOBAL
            if param.param_type_name == "argument":
                record = (param.metavar or param.name.upper(), param.help or "")
                title = declare.ARGUMENTS
            groups.setdefault(title, []).append(record)
        first = groups.pop(declare.ARGUMENTS, [])
        last = groups.pop(declare.GLOBAL, [])
        ordered = [(declare.ARGUMENTS, first), *groups.items(), (declare.GLOBAL, last)]
        for title, rows in ordered:
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=26)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        epilog = self.epilog  # type: ignore[attr-defined]
        if epilog:
            formatter.write("\nExamples:\n")
            formatter.write("".join(f"  {line}\n" for line in epilog.splitlines()))


def _is_heading(line: str) -> bool:
    return line.endswith(":") and line[:1].isalpha()


class Runs:
    """What runs something takes the global options, also after its name (`nvcli chat -q`), and what
    the configuration files say. A mixin: what it calls on `super()` is Typer's.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        own = super().get_params(ctx)  # type: ignore[misc]
        root = ctx.find_root().command
        shared = [p for p in root.params if p.name in (*_GLOBALS, "show_config")]
        return [*own[:-1], *shared, own[-1]]  # the help option stays last

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = _checked(self, ctx, args)
        if given is not None:
            self._read_configuration(ctx, given)
            more = more_flags(self, ctx, given)
            ctx.meta[VARIABLES] = {name: variable for name, (_, variable) in more.items()}
            args = [*(word for words, _ in more.values() for word in words), *args]
        with _naming_command(ctx):
            rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
            return rest

    def _read_configuration(self, ctx: Any, given: dict[str, Any]) -> None:
        from nvcli.cli.configuration import load_configuration

        settings = settings_of(ctx)
        file = given.get("config") or settings.config
        profile = given.get("profile") or settings.profile
        found = load_configuration(self, ctx, config=Path(file) if file else None, profile=profile)
        ctx.meta[FILES], ctx.default_map = found, found.values()

    def invoke(self, ctx: Any) -> Any:
        settings = settings_of(ctx)
        settings.take(ctx)
        if ctx.params["show_config"]:
            from nvcli.cli.configuration import configuration_lines

            given = {name: (getattr(settings, name), at) for name, at in settings.given.items()}
            for line in configuration_lines(ctx, ctx.meta[FILES], given, ctx.meta[VARIABLES]):
                print_lines(visible(line))
            raise typer.Exit
        for name in (*_GLOBALS, "show_config"):
            ctx.params.pop(name)
        check_overwrites(self, ctx, log_file=settings.log_file, config=settings.config)
        settings.start_logging()
        log_said(f"{ctx.command_path}, version {__version__}")  # the file may have other runs
        for sentence in unknown_variables(self, ctx):
            settings.screen().warn(sentence)
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except UsageError as exc:
            name_flag(exc, ctx)
            raise


class Command(Runs, HelpPages, TyperCommand):
    """A command without verbs."""


def _checked(command: Any, ctx: Any, args: list[str]) -> dict[str, Any] | None:
    """What is typed, without what Typer says in words of its own, or takes for something else;
    None for help and completion, which go no further.
    """
    if ctx.resilient_parsing:
        return None
    with _naming_command(ctx):
        given, _, _ = command.make_parser(ctx).parse_args(args=list(args))
    if given.get("help"):
        return None
    for param in command.get_params(ctx):
        flag = max(param.opts, key=len) if param.param_type_name == "option" else param.metavar
        declare.check_file_name(param, given.get(param.name), flag)
    check_variables(command, ctx, given)
    return dict(given)


@contextlib.contextmanager
def _naming_command(ctx: Any) -> Iterator[None]:
    """Some of the parser's complaints do not know where they stand; the hint names the command."""
    try:
        yield
    except ClickUsageError as exc:
        if getattr(exc, "ctx", None) is None:
            exc.ctx = ctx  # type: ignore[attr-defined]
        raise


class Group(HelpPages, TyperGroup):
    """The root: unknown commands get a suggestion."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _checked(self, ctx, args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None:
            asks = ", or 'nvcli chat \"...\"' to ask" if ctx.parent is None else ""
            otherwise = f"Run '{ctx.command_path} --help' for the commands{asks}."
            hint = meant(name, self.commands) or otherwise
            raise UsageError(f"there is no command {name!r}", hint=hint)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


class GroupThatRuns(Runs, Group):
    """A group that is a command without a verb: `nvcli bench`. With one, the global options before
    it count, and all others belong behind it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _naming_command(ctx):
            _, rest, _ = self.make_parser(ctx).parse_args(args=list(args))
        ctx.verb = next(iter(rest), None)
        if ctx.verb is None:
            return super().parse_args(ctx, args)
        return Group.parse_args(self, ctx, args)

    def invoke(self, ctx: Any) -> Any:
        if ctx.verb is None:
            return super().invoke(ctx)
        settings_of(ctx).take(ctx)
        if ctx.params.pop("show_config"):
            raise UsageError(f"--show-config goes after {ctx.verb}", param="show_config")
        for name in _GLOBALS:
            ctx.params.pop(name)
        return Group.invoke(self, ctx)
