"""`nvcli tokens`: count a text, or the whole templated prompt, with the tokenizer alone."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer  # noqa: TC002 - Typer reads the annotations

from nvcli.cli import engine_options, options, sampling_options  # noqa: TC001 - Typer reads the annotations
from nvcli.cli.command import settings_of
from nvcli.cli.console import dump_json, is_terminal, print_text
from nvcli.cli.declare import INPUT, OUTPUT, argument, option
from nvcli.cli.prompt_input import join_parts, read_files, read_stdin, repair_argument, text_or_file
from nvcli.config import DEFAULT_MODEL
from nvcli.errors import UsageError
from nvcli.repl.screen import visible
from nvcli.text.words import counted
from nvcli.types import Message

EXAMPLES = """\
nvcli tokens "How many tokens?"                   a number
cat book.txt | nvcli tokens -m Qwen/Qwen3-0.6B    of a pipe
nvcli tokens --chat --show "Hi"                   the exact prompt of a chat
nvcli tokens --ids "Hi" """.rstrip()


TextArg = Annotated[str | None, argument("TEXT", "- or nothing: standard input.")]
ChatOpt = Annotated[
    bool, option(INPUT, "--chat", "Count the whole prompt of a chat with this question.")
]
IdsOpt = Annotated[bool, option(OUTPUT, "--ids", "Print the token ids.")]
ShowOpt = Annotated[
    bool, option(OUTPUT, "--show", "Print the text that is counted; the count to stderr.")
]
JsonOpt = Annotated[bool, option(OUTPUT, "--json", "One JSON object: model, count, text, ids.")]


def tokens(
    ctx: typer.Context,
    text: TextArg = None,
    model: engine_options.ModelOpt = None,
    chat: ChatOpt = False,
    system: options.SystemOpt = None,
    think: sampling_options.ThinkOpt = None,
    file: options.FileOpt = None,
    ids: IdsOpt = False,
    show: ShowOpt = False,
    json: JsonOpt = False,
) -> None:
    """Count tokens, without loading the model."""
    screen = settings_of(ctx).screen()
    if sum((ids, show, json)) > 1:
        raise UsageError("--ids, --show and --json contradict each other", hint="Give one.")
    if (system is not None or think is not None) and not chat:
        raise UsageError("--system and --think belong to a chat", hint="Add --chat.")
    takes_stdin = text == "-" or (text is None and not file)
    if takes_stdin and is_terminal(sys.stdin) and text is None:
        raise UsageError("there is no text", hint="Give it as an argument, or pipe it in.")
    raw = "" if text in (None, "-") else repair_argument(str(text), "the text", screen.warn)
    if takes_stdin:
        raw = read_stdin(screen.warn, screen.note, is_asked=True)
    blocks = read_files(file or [], screen.warn)
    text = join_parts(raw, "", blocks) if blocks else raw

    from nvcli.cli.models import find_local
    from nvcli.text import Tokenizer

    name = DEFAULT_MODEL if model is None else model
    tokenizer = Tokenizer.from_folder(find_local(name))
    if chat:
        messages = [Message("user", text)]
        if system is not None:
            messages.insert(0, Message("system", text_or_file(system, screen.warn)))
        token_ids = tokenizer.encode_chat(messages, enable_thinking=think is not False)
        text = tokenizer.render(messages, enable_thinking=think is not False)
    else:
        token_ids = tokenizer.encode(text)
    if json:
        found: dict[str, Any] = {"model": name, "count": len(token_ids), "text": text}
        print_text(dump_json({**found, "ids": token_ids}))
    elif ids:
        print_text(" ".join(map(str, token_ids)))
    elif show:
        print_text(visible(text).removesuffix("\n"))
        screen.write_err(f"{counted(len(token_ids), 'token')}\n", dim=True)
    else:
        print_text(str(len(token_ids)))
