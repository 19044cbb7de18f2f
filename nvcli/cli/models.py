"""`nvcli models`: what is here, and fetching, checking and removing it."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvcli.cli.command import CONTEXT, Command, Group, settings_of
from nvcli.cli.console import dump_json, is_terminal, print_lines, print_text
from nvcli.cli.declare import OUTPUT, argument, option
from nvcli.config import DEFAULT_MODEL
from nvcli.errors import ModelError, ModelNotFoundError, NvcliError, UsageError
from nvcli.paths import expand_user
from nvcli.repl.screen import visible

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = """\
nvcli models list                        what is on this machine
nvcli models pull Qwen/Qwen3-0.6B        fetch it into the Hugging Face cache
nvcli models show demo --json            its numbers
nvcli models verify Qwen/Qwen3-0.6B      read it all and compare the hashes"""


NameArg = Annotated[str, argument("MODEL", "demo, a Hugging Face id, or a folder.")]
RepositoryArg = Annotated[str, argument("MODEL", "A Hugging Face id.")]
JsonOpt = Annotated[bool, option(OUTPUT, "--json", "As JSON, for scripts.")]
YesOpt = Annotated[bool, option(OUTPUT, "-y, --yes", "Do not ask.")]

models = typer.Typer(
    cls=Group, epilog=EXAMPLES, name="models", rich_markup_mode=None, context_settings=CONTEXT
)


@models.callback(invoke_without_command=True)
def root(ctx: typer.Context) -> None:
    """List, show, fetch, remove and verify models."""
    if ctx.invoked_subcommand is None:
        print_text(ctx.get_help())


@models.command("list", cls=Command, epilog="nvcli models list -q | xargs -n 1 nvcli models verify")
def list_models(ctx: typer.Context, json: JsonOpt = False) -> None:
    """List the models on this machine; with -q only their names."""
    from nvcli.models.store import stored_models

    found = stored_models()
    if json:
        rows = [{"name": m.name, "bytes": m.size_bytes, "folder": str(m.folder)} for m in found]
        print_text(dump_json(rows))
    elif settings_of(ctx).quiet:
        print_text("\n".join(m.name for m in found))
    else:
        width = max(len(m.name) for m in found)
        lines = [f"{m.name:<{width}}  {size_text(m.size_bytes):>8}  {_origin(m)}" for m in found]
        print_lines(*map(visible, lines))


def _origin(model: Any) -> str:
    return "built in" if model.is_builtin else "Hugging Face cache"


def size_text(size: int) -> str:
    """`28.1 MB`: decimal units, as memory is sold."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def find_local(name: str) -> Path:
    """The model's folder, without a network. Raises `ModelNotFoundError`."""
    from nvcli.models.resolve import is_hub_id
    from nvcli.models.store import stored_models

    if not name.strip():
        raise ModelNotFoundError(
            "the name of the model is empty", hint="nvcli models list shows what is here."
        )
    for model in stored_models():
        if model.name == name:
            return model.folder
    folder = expand_user(name)
    if folder.is_dir():
        return folder
    hint = f"Fetch it with: nvcli models pull {name}" if is_hub_id(name) else None
    raise ModelNotFoundError(
        f"{name} is neither a folder nor in the Hugging Face cache",
        hint=hint or "nvcli models list shows what is here.",
    )


@models.command(
    "show", cls=Command, epilog="nvcli models show Qwen/Qwen3-0.6B --json | jq .kv_bytes_per_token"
)
def show(name: NameArg, json: JsonOpt = False) -> None:
    """Show a model's numbers."""
    facts = model_facts(name, find_local(name))
    if json:
        print_text(dump_json(facts))
        return
    shown = {**facts, "weight_bytes": size_text(facts["weight_bytes"])}
    shown["kv_bytes_per_token"] = size_text(facts["kv_bytes_per_token"])
    for key in {"parameters", "active_parameters"} & facts.keys():
        shown[key] = f"{facts[key]:,}".replace(",", " ")
    shown["quantization"] = facts["quantization"] or "-"
    shown["sampling"] = ", ".join(f"{k} {v}" for k, v in facts["sampling"].items()) or "-"
    shown["files"] = ", ".join(facts["files"]) or "-"
    width = max(map(len, shown))
    print_lines(*(visible(f"{k.replace('_', ' '):<{width}}  {v}") for k, v in shown.items()))


def model_facts(name: str, folder: Path) -> dict[str, Any]:
    from nvcli.models.config import ModelConfig
    from nvcli.models.verify import DamagedFileError, read_weights

    config = ModelConfig.from_hf(folder)
    try:
        weights = read_weights(folder)
    except DamagedFileError as exc:
        raise ModelError(f"{name}: {exc}", hint=f"See: nvcli models verify {name}") from exc
    item_bytes = 4 if config.dtype == "float32" else 2
    experts = {}
    if config.moe is not None:
        idle = config.moe.num_experts - config.moe.num_experts_per_tok
        experts = {
            "active_parameters": weights.num_parameters - idle * config.expert_params,
            "experts": config.moe.num_experts,
            "experts_per_token": config.moe.num_experts_per_tok,
        }
    return {
        "model": name,
        "folder": str(folder),
        "architecture": config.architecture,
        "parameters": weights.num_parameters,
        **experts,
        "weight_bytes": weights.num_bytes,
        "dtype": config.dtype,
        "quantization": "fp8, a scale for 128 x 128 weights" if config.is_fp8 else None,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context": config.max_model_len,
        "kv_bytes_per_token": config.kv_elements_per_token * item_bytes,
        "sampling": dict(config.sampling_defaults),
        "files": list(weights.files),
    }


@models.command(cls=Command, epilog="nvcli models pull Qwen/Qwen3-0.6B")
def pull(ctx: typer.Context, name: RepositoryArg) -> None:
    """Fetch a model into the Hugging Face cache."""
    from nvcli.models.resolve import fetch_model

    folder = fetch_model(name, is_quiet=settings_of(ctx).quiet)
    print_text(visible(str(folder)))


@models.command("rm", cls=Command, epilog="nvcli models rm Qwen/Qwen3-0.6B --yes")
def remove(ctx: typer.Context, name: RepositoryArg, yes: YesOpt = False) -> None:
    """Remove a model from the Hugging Face cache; a folder of yours is never touched."""
    from nvcli.models.store import folder_size, repository_folder

    if name == DEFAULT_MODEL:
        raise ModelError(f"{name} is built in and cannot be removed")
    repository = repository_folder(name)
    if ".." in name or not repository.is_dir():
        raise ModelNotFoundError(
            f"{name!r} is not in the Hugging Face cache", hint="nvcli models list shows what is."
        )
    size = size_text(folder_size(repository / "blobs"))
    if not yes:
        if not is_terminal(sys.stdin):
            raise UsageError(f"removing {name} ({size}) needs a yes", hint="Give --yes.")
        if not typer.confirm(f"Remove {visible(name)} ({size})?", err=True):
            raise NvcliError(f"{name} was kept")
    shutil.rmtree(repository)
    settings_of(ctx).screen().note(f"removed {name}, {size}")


@models.command(
    cls=Command, epilog="nvcli models verify ./my-checkpoint && nvcli chat -m ./my-checkpoint"
)
def verify(ctx: typer.Context, name: NameArg, json: JsonOpt = False) -> None:
    """Check a model's files: tensors, sizes, hashes. Exit 3 when something is wrong."""
    from nvcli.models.verify import verify as check

    folder = find_local(name)
    screen = settings_of(ctx).screen()
    rows: list[dict[str, Any]] = []
    for what, problem in check(folder, progress=lambda file: screen.note(f"reading {file}")):
        rows.append({"file": what, "problem": problem})
        if not json:
            row = f"ok   {what}" if problem is None else f"BAD  {what}  {problem}"
            print_lines(visible(row), indent=5)
    problems = [row for row in rows if row["problem"] is not None]
    if json:
        print_text(dump_json({"model": name, "ok": not problems, "files": rows}))
    if problems:
        raise ModelError(
            f"{name}: {len(problems)} of {len(rows)} checks failed",
            hint="Copy or fetch the files again.",
        )
