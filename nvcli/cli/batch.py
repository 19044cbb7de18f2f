"""`nvcli batch`: answer a file of prompts, one output line for each."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer  # noqa: TC002 - Typer reads the annotations of `batch`

from nvcli.batch.options import (
    BatchOptions,
    InputFormat,
    OnDuplicate,
    Order,
    OutputFormat,
    ProgressMode,
    Shard,
)
from nvcli.cli import batch_options as opts  # noqa: TC001 - Typer reads the annotations
from nvcli.cli import engine_options, options  # noqa: TC001
from nvcli.cli.attach import attach as find_server
from nvcli.cli.bundles import bundled
from nvcli.cli.chat import DEMO_NOTICE, check_sampling
from nvcli.cli.command import refuse_in_dry_run, settings_of
from nvcli.cli.console import check_standard_output, print_lines, print_text
from nvcli.cli.engine_options import EngineOptions, check_replicas, replicas_loader
from nvcli.cli.prompt_input import text_or_file
from nvcli.cli.sampling_options import AnswerFormat, SamplingOptions
from nvcli.config import DEFAULT_MODEL, EngineConfig
from nvcli.errors import UsageError
from nvcli.repl.screen import visible

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.batch.engine import BatchEngine
    from nvcli.client import ServerModel
    from nvcli.repl.screen import Screen

EXAMPLES = """\
nvcli batch prompts.jsonl -o answers.jsonl            a line of JSON a record, an answer for each
nvcli batch prompts.jsonl -o answers.jsonl --resume   go on after a crash, a kill or Ctrl-C
nvcli batch reviews.csv --column text -s @classify.txt -o labels.jsonl
cat prompts.txt | nvcli batch - --input-format text --output-format text
nvcli batch prompts.jsonl -o answers.jsonl --replicas 8     on 8 GPUs, or a cluster's
nvcli batch prompts.jsonl --dry-run                   count tokens, find bad lines, no GPU"""


# What is about the course of a run, or its answers alone.
NOT_IN_A_DRY_RUN = frozenset(
    ("order", "window", "max_errors", "progress", "stats_json", "include_thinking")
)


@bundled
def batch(
    ctx: typer.Context,
    input: opts.InputArg,
    output: opts.OutOpt = None,
    *,
    engine: EngineOptions,
    attach: engine_options.AttachOpt = None,
    replicas: engine_options.ReplicasOpt = None,
    ray_address: engine_options.RayAddressOpt = None,
    drawn: SamplingOptions,
    input_format: opts.InputFormatOpt = InputFormat.AUTO,
    prompt_field: opts.PromptFieldOpt = None,
    system: options.SystemOpt = None,
    raw: options.RawOpt = False,
    on_duplicate: opts.OnDuplicateOpt = OnDuplicate.ERROR,
    strict: opts.StrictOpt = False,
    skip: opts.SkipOpt = 0,
    limit: opts.LimitOpt = None,
    shard: opts.ShardOpt = None,
    output_format: opts.OutputFormatOpt = OutputFormat.AUTO,
    include_thinking: opts.IncludeThinkingOpt = False,
    echo: opts.EchoOpt = None,
    progress: opts.ProgressOpt = ProgressMode.AUTO,
    stats_json: opts.StatsJsonOpt = None,
    resume: opts.ResumeOpt = False,
    retry_errors: opts.RetryErrorsOpt = False,
    force_resume: opts.ForceResumeOpt = False,
    force: opts.ForceOpt = False,
    append: opts.AppendOpt = False,
    order: opts.OrderOpt = Order.INPUT,
    window: opts.WindowOpt = None,
    max_errors: opts.MaxErrorsOpt = None,
    dry_run: opts.DryRunOpt = False,
    json: opts.BatchJsonOpt = False,
) -> int:
    """Answer every record of a file, or of a pipe; one output line for each, in input order.

    A bad record costs one error line. A run that was stopped or killed goes on with --resume.
    """
    settings = settings_of(ctx)
    screen = settings.screen()
    config = engine.config()
    sampling = check_sampling(drawn.given())
    sampling.pop("seed", None)  # of the run: each record gets its own from it
    chosen = BatchOptions(
        input=input,
        output=_output(output),
        input_format=input_format,
        prompt_field=prompt_field,
        output_format=output_format,
        resume=resume,
        retry_errors=retry_errors,
        force=force,
        append=append,
        force_resume=force_resume,
        order=order,
        window=window,
        on_duplicate=on_duplicate,
        is_strict=strict,
        max_errors=max_errors,
        limit=limit,
        skip=skip,
        shard=shard or Shard(),
        stats_json=stats_json,
        include_thinking=include_thinking,
        echo=tuple(name.strip() for name in echo.split(",") if name.strip()) if echo else (),
        sampling=sampling,
        response_format=_response_format(drawn.schema, drawn.format, screen),
        think=drawn.think,
        system=text_or_file(system, screen.warn) if system is not None else None,
        is_raw=raw,
        seed=drawn.seed,
    )
    check_replicas(replicas, ray_address)
    if dry_run:
        refuse_in_dry_run(ctx, NOT_IN_A_DRY_RUN)
    if dry_run and attach not in (None, "auto", "never"):
        raise UsageError(
            "--dry-run counts with the model's files here, --attach is for a run",
            hint="Leave it out, or give --attach never.",
        )
    if dry_run and replicas is not None:
        raise UsageError("--replicas is for a run, --dry-run estimates for one GPU")
    if json and not dry_run:
        raise UsageError("--json is for --dry-run", hint="A run's output is JSON Lines already.")
    if dry_run:
        return _dry_run(chosen, config, as_json=json)
    from nvcli.batch.job import run_job
    from nvcli.batch.progress import Progress

    shown = Progress(progress, sys.stderr, is_quiet=settings.quiet)
    load: Callable[[], BatchEngine] = partial(_load_llm, config)
    in_what = ""
    if replicas is not None:
        if attach not in (None, "never"):
            raise UsageError("--replicas and --attach contradict each other", hint="Leave one out.")
        attach = "never"
        load = replicas_loader(config, replicas, ray_address, shown.note)
        in_what = f" in {replicas} replicas"
    load = _announced(load, config, in_what, screen)
    is_model_given = engine.model is not None
    server = find_server(attach or "auto", config, screen, is_model_given=is_model_given)
    try:
        return run_job(
            chosen,
            config,
            find_model=lambda: _model_of(config, server),
            load=load if server is None else _attacher(config, server),
            progress=shown,
        )
    finally:
        if server is not None:
            server.close()


def _model_of(config: EngineConfig, server: ServerModel | None) -> Path | str:
    """The folder that says which model it is. A run that began here goes on at a server with the
    same model, and the other way round."""
    from nvcli.models.resolve import find_local, resolve_model

    if server is None:
        return resolve_model(config.model)
    return find_local(server.root) or f"{server.root} of a server"


def _attacher(config: EngineConfig, server: ServerModel) -> Callable[[], BatchEngine]:
    def load() -> BatchEngine:
        from nvcli.batch.attached import HttpEngine

        return HttpEngine(server, config)

    return load


def _output(path: Path | None) -> Path | None:
    """A link stands for its file: two runs with two names of it must meet at one lock, and a
    rewritten output must not take the link's place. What leads to a pipe has no other name:
    `>(command)` is a link in /proc to a name that nothing has."""
    if path is None or str(path) in ("-", "/dev/stdout"):
        check_standard_output()
        return None
    leads_to_file = os.path.islink(path) and (path.is_file() or not path.exists())
    return Path(os.path.realpath(path)) if leads_to_file else path  # also links in a ring


def _response_format(
    schema: str | None, format: AnswerFormat, screen: Screen
) -> dict[str, Any] | None:
    if schema is None:
        return {"type": "json_object"} if format is AnswerFormat.JSON else None
    if format is AnswerFormat.JSON:
        raise UsageError("--schema and --format json contradict each other", hint="Leave one out.")
    from nvcli.repl.command_view import read_schema

    found = {"name": "answer", "schema": read_schema(schema, screen.warn)}
    return {"type": "json_schema", "json_schema": found}


def _load_llm(config: EngineConfig) -> BatchEngine:
    from nvcli.llm import LLM  # torch comes with it

    return LLM(config=config)


def _announced(
    load: Callable[[], BatchEngine], config: EngineConfig, in_what: str, screen: Screen
) -> Callable[[], BatchEngine]:
    """A terminal sees that it loads, and which model answers where none was named."""

    def announced() -> BatchEngine:
        from nvcli.cli.console import Spinner, tell_startup

        with Spinner(screen, f"loading {config.model}{in_what}"):
            engine = load()
        tell_startup(screen, engine.startup)
        if config.model == DEFAULT_MODEL and screen.err_is_terminal:
            screen.note(DEMO_NOTICE)
        return engine

    return announced


def _dry_run(chosen: BatchOptions, config: EngineConfig, *, as_json: bool) -> int:
    """Exit code 2 where a run would refuse the input or the output, 4 where records would fail."""
    from json import dumps

    from nvcli.batch.dry_run import dry_run
    from nvcli.batch.fingerprint import fingerprint
    from nvcli.batch.job import SOME_FAILED
    from nvcli.batch.target import Target
    from nvcli.models.config import ModelConfig
    from nvcli.models.resolve import resolve_model
    from nvcli.text import load_tokenizer

    folder = resolve_model(config.model)
    is_file = chosen.output is not None
    target = Target.check(chosen, fingerprint(chosen, config, folder) if is_file else None)
    target.scan()
    model = ModelConfig.from_hf(folder)
    tokenizer = load_tokenizer(folder, is_optional=config.load_format == "dummy")
    length = model.model_len(config.max_model_len)
    found = dry_run(chosen, model, tokenizer, length, target.existing)
    if as_json:
        print_text(dumps(found.as_json()))
    else:
        print_lines(*map(visible, found.lines(chosen.input)))
    if found.duplicates or (chosen.is_strict and found.codes):
        return 2
    kept_errors = target.existing.num_errors if target.existing is not None else 0
    return SOME_FAILED if found.codes or kept_errors else 0
