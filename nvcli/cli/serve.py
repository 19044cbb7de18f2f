"""`nvcli serve`: the OpenAI-compatible server."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer  # noqa: TC002 - Typer reads the annotations of `serve`

from nvcli.cli import engine_options
from nvcli.cli import serve_options as opts
from nvcli.cli.bundles import bundled
from nvcli.cli.command import settings_of, typed_names
from nvcli.cli.engine_options import EngineOptions, check_replicas, one_model, replicas_loader
from nvcli.config import DEFAULT_MODEL, EngineConfig
from nvcli.errors import UsageError
from nvcli.paths import read_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.repl.screen import Screen
    from nvcli.server.engine import ServerEngine

EXAMPLES = """\
nvcli serve                                     the built-in model on 127.0.0.1:8000
nvcli serve Qwen/Qwen3-0.6B --port 9000         another model, another port
nvcli serve --host 0.0.0.0 --api-key-file key   for other machines, with a key
nvcli serve Qwen/Qwen3-8B --replicas 8          one address for eight GPUs, or a cluster's
curl 127.0.0.1:8000/v1/models                   what it serves"""


@bundled
def serve(
    ctx: typer.Context,
    model_argument: engine_options.ModelArg = None,
    *,
    loaded: EngineOptions,
    replicas: engine_options.ReplicasOpt = None,
    ray_address: engine_options.RayAddressOpt = None,
    host: opts.HostOpt = "127.0.0.1",
    port: opts.PortOpt = 8000,
    uds: opts.UdsOpt = None,
    ready_file: opts.ReadyFileOpt = None,
    api_key_file: opts.KeyFileOpt = None,
    cors_origin: opts.CorsOpt = None,
    allowed_host: opts.AllowedHostOpt = None,
    mcp: opts.McpOpt = None,
    mcp_allow: opts.McpAllowOpt = None,
    metrics: opts.MetricsOpt = opts.MetricsChoice.KEY,
    served_model_name: opts.NameOpt = None,
    think: opts.ThinkOpt = True,
    generation_config: opts.GenerationConfigOpt = opts.GenerationConfigChoice.AUTO,
    strict_api: opts.StrictOpt = False,
    allow_request_template: opts.TemplateOpt = False,
    ping_interval: opts.PingOpt = None,
    log_requests: opts.LogRequestsOpt = False,
    max_queue: opts.QueueOpt = 1024,
    request_timeout: opts.TimeoutOpt = None,
    drain_timeout: opts.DrainOpt = 30.0,
    store_limit: opts.StoreOpt = 1000,
    storage: opts.StorageOpt = None,
    engine: opts.EngineOpt = opts.EngineChoice.AUTO,
) -> int:
    """Answer OpenAI's API over HTTP.

    The first signal (SIGTERM, Ctrl-C) lets running requests end, the second ends at once. With
    --replicas SIGHUP replaces them one after another by new ones, which load the model anew.
    """
    from nvcli.server.config import ServerConfig
    from nvcli.server.run import serve as run_server

    screen = settings_of(ctx).screen()
    for name in ("host", "port"):
        if uds is not None and {"uds", name} <= set(typed_names(ctx)):
            raise UsageError(f"--uds and --{name} contradict each other", hint="Leave one out.")
    engine_config = loaded.config(one_model(ctx, model_argument, loaded.model)).replace(
        generation_config=generation_config.value
    )
    config = ServerConfig(
        host=host,
        port=port,
        uds=uds,
        attach_socket=_attach_socket() if uds is None else None,
        api_keys=read_keys(api_key_file),
        served_model_names=tuple(served_model_name or ()),
        max_queue=max_queue,
        request_timeout=request_timeout,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        mcp_file=mcp,
        mcp_allow=tuple(mcp_allow or ()),
        metrics=metrics.value,
        log_requests=log_requests,
        drain_timeout=drain_timeout,
        ready_file=ready_file,
        is_strict=strict_api,
        ping_interval=ping_interval,
        store_limit=store_limit,
        storage=storage,
        allow_template=allow_request_template,
        enable_thinking=think,
    )
    check_replicas(replicas, ray_address)

    def tell(text: str) -> None:
        """Also where no terminal is: a service's log wants these lines."""
        screen.line_err(text, is_shown=not screen.is_quiet)

    if replicas is None:
        load: Callable[[], ServerEngine] = partial(_load_engine, engine_config, engine)
    elif engine is not opts.EngineChoice.AUTO:
        raise UsageError("--engine says where one engine runs, --replicas makes several in Ray")
    else:
        load = replicas_loader(engine_config, replicas, ray_address, tell)
    return run_server(
        config, _with_notice(load, engine_config, screen), note=tell, warn=screen.warn
    )


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys of the file and of `NVCLI_API_KEY`. Raises `UsageError`."""
    keys = []
    if path is not None:
        try:
            lines = read_whole(path).decode("utf-8").splitlines()
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "strerror", None) or "it is no UTF-8 text"
            raise UsageError(f"cannot read {path}: {reason}", param="api_key_file") from exc
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise UsageError(f"{path} holds no key", param="api_key_file")
    from_environment = os.environ.get("NVCLI_API_KEY", "").strip()
    return (*keys, *([from_environment] if from_environment else []))


def _load_engine(config: EngineConfig, engine: opts.EngineChoice) -> ServerEngine:
    if engine is opts.EngineChoice.PROCESS or (
        engine is opts.EngineChoice.AUTO and _has_gpu(config)
    ):
        from nvcli.server.remote_engine import RemoteEngine

        return RemoteEngine(config)
    from nvcli.llm import LLM  # torch comes with it

    return LLM(config=config)


def _with_notice(
    load: Callable[[], ServerEngine], config: EngineConfig, screen: Screen
) -> Callable[[], ServerEngine]:
    """Told when it is loaded: which model answers where none was named."""

    def noticed() -> ServerEngine:
        from nvcli.cli.chat import DEMO_NOTICE
        from nvcli.cli.console import tell_startup

        engine = load()
        tell_startup(screen, engine.startup, with_stages=False)  # the server tells them
        if config.model == DEFAULT_MODEL:
            screen.note(DEMO_NOTICE)
        return engine

    return noticed


def _attach_socket() -> Path | None:
    """Where `--attach auto` looks; None without a folder of this user's for it."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if not folder.is_absolute() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return None
    return folder / "nvcli" / "serve.sock"


def _has_gpu(config: EngineConfig) -> bool:
    """Without torch, which this process need not load."""
    return config.device != "cpu" and Path("/dev/nvidiactl").exists()
