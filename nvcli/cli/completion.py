"""`nvcli completion`: the script that makes Tab work in a shell, and the values it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from nvcli.cli.console import print_text
from nvcli.cli.declare import ARGUMENTS, argument, option
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

EXAMPLES = """\
source <(nvcli completion bash)                                       bash, this shell
nvcli completion zsh > "${fpath[1]}/_nvcli"                           zsh, for good
nvcli completion fish > ~/.config/fish/completions/nvcli.fish         fish, for good"""


ShellArg = Annotated[str | None, argument("bash|zsh|fish", "The shell that reads it.")]
ValuesOpt = Annotated[
    str | None, option(ARGUMENTS, "--values KIND", "For the scripts.", hidden=True)
]


def completion(shell: ShellArg = None, values: ValuesOpt = None) -> None:
    """Print the completion script of a shell."""
    if values is not None:
        print_text("\n".join(_values(values)))
        return
    from nvcli.cli.command_table import command_rows
    from nvcli.cli.completion_scripts import SCRIPTS

    if shell not in SCRIPTS:
        given = "no shell was named" if shell is None else f"there is no completion for {shell!r}"
        raise UsageError(given, hint="Name bash, zsh or fish.")
    print_text(SCRIPTS[shell](command_rows()).removesuffix("\n"))


def _values(kind: str) -> Iterable[str]:
    if kind == "models":
        from nvcli.models.store import stored_models

        return [model.name for model in stored_models()]
    if kind == "sessions":
        from nvcli.repl.store import session_names

        return session_names()
    if kind == "profiles":
        from nvcli.cli.configuration import profile_names

        return profile_names()
    raise UsageError(f"there are no values of kind {kind!r}")
