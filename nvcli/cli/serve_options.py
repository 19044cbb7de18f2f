"""The options of `nvcli serve` alone, once: flags, help text, group."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from nvcli.cli.declare import FLOAT, INT, choice, option

LISTEN = "Listening"
ACCESS = "Access"
LIMITS = "Limits"
BEHAVIOUR = "Behaviour"


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
AllowedHostOpt = Annotated[
    list[str] | None,
    option(
        "--allowed-host",
        metavar="NAME",
        group=ACCESS,
        help="Without a key, also answer to this name; may be given again, *.NAME, * is any.",
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
