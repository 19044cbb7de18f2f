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


HostOpt = Annotated[str, option(LISTEN, "--host ADDRESS", "Default: 127.0.0.1, this machine.")]
PortOpt = Annotated[int, option(LISTEN, "--port N", "Default: 8000; 0: a free one.", INT)]
UdsOpt = Annotated[
    Path | None, option(LISTEN, "--uds PATH", "A Unix socket in place of host and port.")
]
ReadyFileOpt = Annotated[
    Path | None,
    option(
        LISTEN,
        "--ready-file FILE",
        "Written when requests are answered: url, pid and model as JSON.",
    ),
]
KeyFileOpt = Annotated[
    Path | None,
    option(
        ACCESS,
        "--api-key-file FILE",
        "Keys, one a line; a request must bring one. Also: NVCLI_API_KEY.",
    ),
]
CorsOpt = Annotated[
    list[str] | None,
    option(
        ACCESS, "--cors-origin ORIGIN", "Browsers may call from here; may be given again, * is any."
    ),
]
AllowedHostOpt = Annotated[
    list[str] | None,
    option(
        ACCESS,
        "--allowed-host NAME",
        "Without a key, also answer to this name; may be given again, *.NAME, * is any.",
    ),
]
MetricsOpt = Annotated[
    MetricsChoice,
    option(
        ACCESS,
        "--metrics key|open|off",
        "Who reads /metrics: with the key (default), anybody, nobody.",
        choice(MetricsChoice),
    ),
]
NameOpt = Annotated[
    list[str] | None,
    option(
        BEHAVIOUR, "--served-model-name NAME", "What requests call the model; may be given again."
    ),
]
StrictOpt = Annotated[bool, option(BEHAVIOUR, "--strict-api", "Unknown request fields are errors.")]
ThinkOpt = Annotated[
    bool,
    option(
        BEHAVIOUR,
        "--think/--no-think",
        "Whether the model thinks where a request leaves it open; default: yes.",
    ),
]
GenerationConfigOpt = Annotated[
    GenerationConfigChoice,
    option(
        BEHAVIOUR,
        "--generation-config auto|none",
        "Sampling defaults: of the checkpoint (auto), or OpenAI's (none).",
        choice(GenerationConfigChoice),
    ),
]
TemplateOpt = Annotated[
    bool,
    option(BEHAVIOUR, "--allow-request-template", "Requests may bring their own chat template."),
]
LogRequestsOpt = Annotated[bool, option(BEHAVIOUR, "--log-requests", "One log line a request.")]
PingOpt = Annotated[
    float | None,
    option(
        BEHAVIOUR,
        "--ping-interval S",
        "A comment in a stream after S seconds of silence; default: none.",
        FLOAT,
    ),
]
QueueOpt = Annotated[
    int,
    option(LIMITS, "--max-queue N", "Sequences that may wait; more get a 429. Default: 1024.", INT),
]
TimeoutOpt = Annotated[
    float | None,
    option(
        LIMITS,
        "--request-timeout S",
        "A request ends with an error after S seconds; default: never.",
        FLOAT,
    ),
]
DrainOpt = Annotated[
    float,
    option(
        LIMITS,
        "--drain-timeout S",
        "Seconds that running requests get after SIGTERM; default: 30.",
        FLOAT,
    ),
]
StoreOpt = Annotated[
    int,
    option(LIMITS, "--store-limit N", "Answers kept for requests with store; default: 1000.", INT),
]

McpOpt = Annotated[
    Path | None,
    option(
        ACCESS,
        "--mcp FILE",
        "MCP servers that requests may name by label: the usual mcpServers JSON.",
    ),
]
McpAllowOpt = Annotated[
    list[str] | None,
    option(
        ACCESS,
        "--mcp-allow URL_PREFIX",
        "Requests may bring MCP servers under this URL; may be given again.",
    ),
]

StorageOpt = Annotated[
    Path | None,
    option(
        BEHAVIOUR,
        "--storage FOLDER",
        "Keep files and batches here; without it /v1/files and /v1/batches are not there.",
    ),
]

EngineOpt = Annotated[
    EngineChoice,
    option(
        BEHAVIOUR,
        "--engine auto|process|thread",
        "Where the engine runs; auto: a process of its own where there is a GPU.",
        choice(EngineChoice),
    ),
]
