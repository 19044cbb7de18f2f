"""Writes docs/cli.md, and the tables of docs/repl.md, from the program itself: run it after a
change of options or commands. A test compares.

    python docs/make_reference.py
"""

from __future__ import annotations

import re
from pathlib import Path

from nvcli.cli.app import command_line
from nvcli.cli.command_table import CommandRow, Option, command_rows
from nvcli.cli.configuration import READING, REFUSED
from nvcli.repl.commands import COMMANDS

DOCS = Path(__file__).resolve().parent

HEAD = """\
# The command line

Made by `python docs/make_reference.py` from the program; a test compares.

`nvcli COMMAND --help` prints the same. Options may stand before or after arguments. The answer goes
to standard output, everything else to standard error; both are plain text where no terminal is.
"""

TAIL = """\
## Configuration

A value comes from the first of these that has it:

1. a flag;
2. an environment variable: `NVCLI_<COMMAND>_<FLAG>`, such as `NVCLI_CHAT_TOP_P`, then one of
   `NVCLI_MODEL`, `NVCLI_COLOR`, `NVCLI_LOG`, `NVCLI_CONFIG`, `NVCLI_PROFILE`, `NVCLI_ATTACH`,
   `NVCLI_NO_HISTORY`, `NVCLI_API_KEY`;
3. `./nvcli.toml`;
4. `$XDG_CONFIG_HOME/nvcli/config.toml` (`~/.config/nvcli/config.toml`);
5. the default, for sampling the checkpoint's `generation_config.json`.

`--config FILE` is read in place of the two files. `nvcli chat --show-config` prints every value
with where it came from. A key is a long flag without its dashes; at the top it counts for every
command that has the flag, in a table named after a command for that one:

```toml
model = "Qwen/Qwen3-0.6B"
temperature = 0.3

[chat]
show-thinking = "fold"
tools = ["~/tools.py"]

[serve]
port = 9000

[profile.code]            # nvcli chat --profile code
temperature = 0.0

[profile.code.chat]
system = "Answer with code only."
```

An unknown key ends the run and names the nearest known one. Entering a folder must not run its
code: `./nvcli.toml` may not set {refused}.
What reads a file ({reading}) may name only one in the folder.

A switch's variable is 1 or 0, also of its second half (`NVCLI_CHAT_NO_THINK=1`); two that
contradict each other are refused. Several values stand apart by spaces, several paths by colons. A
variable that is no option's gives a warning.

Also honoured: `NO_COLOR`, `FORCE_COLOR`, `TERM`, `VISUAL`, `EDITOR`, `HF_HOME`, `HF_HUB_CACHE`,
`HF_HUB_OFFLINE`, `CUDA_VISIBLE_DEVICES`.

## Exit codes

| code | meaning |
|--:|---|
| 0 | done |
| 1 | a failure at run time: I/O, engine, request refused, `doctor` found what blocks |
| 2 | usage, a bad input file under `--strict`, a refused overwrite |
| 3 | the model or the device cannot be used |
| 4 | batch finished, some records failed |
| 5 | a bench gate failed |
| 6 | a bench measurement is unsound |
| 129, 130, 143 | SIGHUP (a terminal that closes), SIGINT, SIGTERM; what was produced is out |
| 141 | the reader closed the pipe |

## Files

History and conversations are in `$XDG_STATE_HOME/nvcli` (`~/.local/state/nvcli`), mode 0600. A
conversation is JSON Lines: a record `{{"messages": [...]}}` a turn, the last the longest;
`nvcli batch` accepts it. [repl.md](repl.md) is about the conversation.
"""


def reference() -> str:
    parts = [HEAD]
    for row in command_rows():
        parts.append(_page(row))
    refused = ", ".join(f"`{name.replace('_', '-')}`" for name in sorted(REFUSED))
    reading = ", ".join(f"`{name}`" for name in sorted(READING))
    parts.append(_wrap_last(TAIL.format(refused=refused, reading=reading)))
    return "\n".join(parts)


def _page(row: CommandRow) -> str:
    command = command_line()
    for name in row.path:
        command = command.commands[name]
    level = "##" if len(row.path) < 2 else "###"
    arguments = "".join(f" {value.name}" for value in row.arguments)
    parts = [f"{level} {' '.join(['nvcli', *row.path])}{arguments}", _prose(command.help or "")]
    if row.subcommands:
        parts.append("\n".join(["| command | |", "|---|---|", *map(_sub, row.subcommands)]))
    options = [o for o in row.options if row.path == () or o.name not in _global_names()]
    if options:
        parts.append("\n".join(["| option | |", "|---|---|", *map(_option, options)]))
    if command.epilog:
        parts.append(f"```sh\n{command.epilog}\n```")
    return "\n\n".join(parts) + "\n"


def _global_names() -> set[str]:
    return {option.name for option in command_rows()[0].options}


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _sub(entry: tuple[str, str]) -> str:
    return f"| `{entry[0]}` | {_cell(entry[1])} |"


def _option(option: Option) -> str:
    value = f" {option.value.name}" if option.value is not None else ""
    return f"| `{_cell(', '.join(option.flags) + value)}` | {_cell(option.help)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _wrap_last(text: str) -> str:
    return text.rstrip("\n") + "\n"


def repl_page(text: str) -> str:
    """docs/repl.md with its table of commands filled in."""
    rows = ["| command | |", "|---|---|"]
    for c in COMMANDS:
        names = ", ".join(f"`/{name}`" for name in (c.name, *c.aliases))
        arguments = f" `{_cell(c.arguments)}`" if c.arguments else ""
        rows.append(f"| {names}{arguments} | {_cell(c.help)} |")
    table = "\n".join(["<!-- commands -->", "", *rows, "", "<!-- end commands -->"])
    return re.sub(
        r"<!-- commands -->.*<!-- end commands -->", lambda _: table, text, flags=re.DOTALL
    )


def main() -> None:
    (DOCS / "cli.md").write_text(reference(), encoding="utf-8")
    page = DOCS / "repl.md"
    page.write_text(repl_page(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
