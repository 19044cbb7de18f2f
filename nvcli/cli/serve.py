"""`nvcli serve`: the OpenAI-compatible server."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer  # noqa: TC002 - Typer reads the annotations of `serve`

from nvcli.cli import engine_options
from nvcli.cli.app import Command, settings_of
from nvcli.cli.declare import FLOAT, INT, choice, option
from nvcli.config import DEFAULT_MODEL, EngineConfig
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.llm import LLM
    from nvcli.repl.screen import Screen
    from nvcli.server.engine import ServerEngine
    from nvcli.server.remote_engine import RemoteEngine

LISTEN = "Listening"
ACCESS = "Access"
LIMITS = "Limits"
BEHAVIOUR = "Behaviour"


class ServeCommand(Command):
    examples = """\
nvcli serve                                     the built-in model on 127.0.0.1:8000
nvcli serve -m Qwen/Qwen3-0.6B --port 9000      another model, another port
nvcli serve --host 0.0.0.0 --api-key-file key   for other machines, with a key
nvcli serve -m Qwen/Qwen3-8B --replicas 8       one address for eight GPUs, or a cluster's
curl 127.0.0.1:8000/v1/models                   what it serves"""


class MetricsChoice(StrEnum):
    KEY = "key"
    OPEN = "open"
    OFF = "off"


class EngineChoice(StrEnum):
    AUTO = "auto"
    PROCESS = "process"
    THREAD = "thread"


class GenerationConfigChoice(StrEnum):
    AUTO = "auto"
    NONE = "none"


HostOpt = Annotated[
    str,
    option("--host", metavar="ADDRESS", group=LISTEN, help="Default: 127.0.0.1, this machine."),
]
PortOpt = Annotated[
    int,
    option("--port", parser=INT, metavar="N", group=LISTEN, help="Default: 8000; 0: a free one."),
]
UdsOpt = Annotated[
    Path | None,
    option("--uds", metavar="PATH", group=LISTEN, help="A Unix socket in place of host and port."),
]
ReadyFileOpt = Annotated[
    Path | None,
    option(
        "--ready-file",
        metavar="FILE",
        group=LISTEN,
        help="Written when requests are answered: url, pid and model as JSON.",
    ),
]
KeyFileOpt = Annotated[
    Path | None,
    option(
        "--api-key-file",
        metavar="FILE",
        group=ACCESS,
        help="Keys, one a line; a request must bring one. Also: NVCLI_API_KEY.",
    ),
]
CorsOpt = Annotated[
    list[str] | None,
    option(
        "--cors-origin",
        metavar="ORIGIN",
        group=ACCESS,
        help="Browsers may call from here; may be given again, * is any.",
    ),
]
MetricsOpt = Annotated[
    MetricsChoice,
    option(
        "--metrics",
        parser=choice(MetricsChoice),
        metavar="key|open|off",
        group=ACCESS,
        help="Who reads /metrics: with the key (default), anybody, nobody.",
    ),
]
NameOpt = Annotated[
    list[str] | None,
    option(
        "--served-model-name",
        metavar="NAME",
        group=BEHAVIOUR,
        help="What requests call the model; may be given again.",
    ),
]
StrictOpt = Annotated[
    bool, option("--strict-api", group=BEHAVIOUR, help="Unknown request fields are errors.")
]
ThinkOpt = Annotated[
    bool,
    option(
        "--think/--no-think",
        group=BEHAVIOUR,
        help="Whether the model thinks where a request leaves it open; default: yes.",
    ),
]
GenerationConfigOpt = Annotated[
    GenerationConfigChoice,
    option(
        "--generation-config",
        parser=choice(GenerationConfigChoice),
        metavar="auto|none",
        group=BEHAVIOUR,
        help="Sampling defaults: of the checkpoint (auto), or OpenAI's (none).",
    ),
]
TemplateOpt = Annotated[
    bool,
    option(
        "--allow-request-template",
        group=BEHAVIOUR,
        help="Requests may bring their own chat template.",
    ),
]
LogRequestsOpt = Annotated[
    bool, option("--log-requests", group=BEHAVIOUR, help="One log line a request.")
]
PingOpt = Annotated[
    float | None,
    option(
        "--ping-interval",
        parser=FLOAT,
        metavar="S",
        group=BEHAVIOUR,
        help="A comment in a stream after S seconds of silence; default: none.",
    ),
]
QueueOpt = Annotated[
    int,
    option(
        "--max-queue",
        parser=INT,
        metavar="N",
        group=LIMITS,
        help="Sequences that may wait; more get a 429. Default: 1024.",
    ),
]
TimeoutOpt = Annotated[
    float | None,
    option(
        "--request-timeout",
        parser=FLOAT,
        metavar="S",
        group=LIMITS,
        help="A request ends with an error after S seconds; default: never.",
    ),
]
DrainOpt = Annotated[
    float,
    option(
        "--drain-timeout",
        parser=FLOAT,
        metavar="S",
        group=LIMITS,
        help="Seconds that running requests get after SIGTERM; default: 30.",
    ),
]
StoreOpt = Annotated[
    int,
    option(
        "--store-limit",
        parser=INT,
        metavar="N",
        group=LIMITS,
        help="Answers kept for requests with store; default: 1000.",
    ),
]

McpOpt = Annotated[
    Path | None,
    option(
        "--mcp",
        metavar="FILE",
        group=ACCESS,
        help="MCP servers that requests may name by label: the usual mcpServers JSON.",
    ),
]
McpAllowOpt = Annotated[
    list[str] | None,
    option(
        "--mcp-allow",
        metavar="URL_PREFIX",
        group=ACCESS,
        help="Requests may bring MCP servers under this URL; may be given again.",
    ),
]

StorageOpt = Annotated[
    Path | None,
    option(
        "--storage",
        metavar="FOLDER",
        group=BEHAVIOUR,
        help="Keep files and batches here; without it /v1/files and /v1/batches are not there.",
    ),
]

EngineOpt = Annotated[
    EngineChoice,
    option(
        "--engine",
        parser=choice(EngineChoice),
        metavar="auto|process|thread",
        group=BEHAVIOUR,
        help="Where the engine runs; auto: a process of its own where there is a GPU.",
    ),
]


def serve(
    ctx: typer.Context,
    model: engine_options.ModelOpt = None,
    device: engine_options.DeviceOpt = None,
    dtype: engine_options.DTypeOpt = None,
    max_model_len: engine_options.MaxModelLenOpt = None,
    gpu_memory_utilization: engine_options.MemoryOpt = None,
    kv_cache_dtype: engine_options.KVCacheDTypeOpt = None,
    max_num_seqs: engine_options.MaxNumSeqsOpt = None,
    tensor_parallel_size: engine_options.TensorParallelOpt = None,
    load_format: engine_options.LoadFormatOpt = None,
    enforce_eager: engine_options.EnforceEagerOpt = False,
    deterministic: engine_options.DeterministicOpt = False,
    replicas: engine_options.ReplicasOpt = None,
    ray_address: engine_options.RayAddressOpt = None,
    host: HostOpt = "127.0.0.1",
    port: PortOpt = 8000,
    uds: UdsOpt = None,
    ready_file: ReadyFileOpt = None,
    api_key_file: KeyFileOpt = None,
    cors_origin: CorsOpt = None,
    mcp: McpOpt = None,
    mcp_allow: McpAllowOpt = None,
    metrics: MetricsOpt = MetricsChoice.KEY,
    served_model_name: NameOpt = None,
    think: ThinkOpt = True,
    generation_config: GenerationConfigOpt = GenerationConfigChoice.AUTO,
    strict_api: StrictOpt = False,
    allow_request_template: TemplateOpt = False,
    ping_interval: PingOpt = None,
    log_requests: LogRequestsOpt = False,
    max_queue: QueueOpt = 1024,
    request_timeout: TimeoutOpt = None,
    drain_timeout: DrainOpt = 30.0,
    store_limit: StoreOpt = 1000,
    storage: StorageOpt = None,
    engine: EngineOpt = EngineChoice.AUTO,
) -> int:
    """Answer OpenAI's API over HTTP.

    The first signal (SIGTERM, Ctrl-C) lets running requests end, the second ends at once.
    """
    from nvcli.server.config import ServerConfig
    from nvcli.server.run import serve as run_server

    screen = settings_of(ctx).screen()
    engine_config = EngineConfig.from_options(
        model=model or DEFAULT_MODEL,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        tensor_parallel_size=tensor_parallel_size,
        load_format=load_format,
        enforce_eager=enforce_eager,
        deterministic=deterministic,
        generation_config=generation_config.value,
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
    engine_options.check_replicas(replicas, ray_address)

    def tell(text: str) -> None:
        """Also where no terminal is: a service's log wants these lines."""
        if not screen.is_quiet:
            screen.write_err(f"{text}\n")

    if replicas is None:
        load = _loader(engine_config, screen, engine)
    elif engine is not EngineChoice.AUTO:
        raise UsageError("--engine says where one engine runs, --replicas makes several in Ray")
    else:
        load = _replicas_loader(engine_config, screen, replicas, ray_address, tell)
    return run_server(config, load, note=tell, warn=screen.warn)


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys of the file and of `NVCLI_API_KEY`. Raises `UsageError`."""
    keys = []
    if path is not None:
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "strerror", None) or "it is no UTF-8 text"
            raise UsageError(f"cannot read {path}: {reason}", param="api_key_file") from exc
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise UsageError(f"{path} holds no key", param="api_key_file")
    from_environment = os.environ.get("NVCLI_API_KEY", "").strip()
    return (*keys, *([from_environment] if from_environment else []))


def _loader(
    config: EngineConfig, screen: Screen, engine: EngineChoice
) -> Callable[[], ServerEngine]:
    def load() -> ServerEngine:
        from nvcli.cli.chat import DEMO_NOTICE

        llm: RemoteEngine | LLM
        if engine is EngineChoice.PROCESS or (engine is EngineChoice.AUTO and _has_gpu(config)):
            from nvcli.server.remote_engine import RemoteEngine

            llm = RemoteEngine(config)
        else:
            from nvcli.llm import LLM  # torch comes with it

            llm = LLM(config=config)
        if llm.is_demo:
            screen.note(DEMO_NOTICE)
        return llm

    return load


def _replicas_loader(
    config: EngineConfig,
    screen: Screen,
    num_replicas: int,
    address: str | None,
    note: Callable[[str], None],
) -> Callable[[], ServerEngine]:
    """Raises `UsageError` at once where Ray is not installed."""
    from nvcli.cluster.runtime import require_ray

    require_ray()

    def load() -> ServerEngine:
        from nvcli.cli.chat import DEMO_NOTICE
        from nvcli.cluster.replicated_engine import ReplicatedEngine

        engine = ReplicatedEngine(config, num_replicas, address=address, note=note)
        if engine.is_demo:
            screen.note(DEMO_NOTICE)
        return engine

    return load


def _attach_socket() -> Path | None:
    """Where `--attach auto` looks; None without a folder of this user's for it."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if not folder.is_absolute() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return None
    return folder / "nvcli" / "serve.sock"


def _has_gpu(config: EngineConfig) -> bool:
    """Without torch, which this process need not load."""
    return config.device != "cpu" and Path("/dev/nvidiactl").exists()


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(cls=ServeCommand)(serve)
