"""Options that say how answers are drawn, and which shape they have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from nvcli.cli.declare import FLOAT, INT, SAMPLING, choice, option


class AnswerFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


TemperatureOpt = Annotated[
    float | None,
    option(
        SAMPLING,
        "-t, --temperature X",
        "0 to 2; 0 is greedy. Default: the model's, for Qwen3 0.6 thinking, 0.7 without.",
        FLOAT,
    ),
]
TopPOpt = Annotated[
    float | None, option(SAMPLING, "--top-p X", "Keep the likeliest tokens of mass X.", FLOAT)
]
TopKOpt = Annotated[
    int | None, option(SAMPLING, "--top-k N", "Keep the N likeliest tokens; 0: all.", INT)
]
MinPOpt = Annotated[
    float | None,
    option(SAMPLING, "--min-p X", "Drop tokens less likely than X times the likeliest.", FLOAT),
]
PresencePenaltyOpt = Annotated[
    float | None,
    option(
        SAMPLING,
        "--presence-penalty X",
        "-2 to 2; over 0 makes tokens already in the answer less likely.",
        FLOAT,
    ),
]
RepetitionPenaltyOpt = Annotated[
    float | None,
    option(
        SAMPLING,
        "--repetition-penalty X",
        "Over 0 to 2; over 1 makes tokens of prompt and answer less likely.",
        FLOAT,
    ),
]
MaxTokensOpt = Annotated[
    int | None,
    option(
        SAMPLING,
        "-n, --max-tokens N",
        "At most N tokens, thinking included; default: the room left in the context.",
        INT,
    ),
]
StopOpt = Annotated[
    list[str] | None,
    option(SAMPLING, "--stop TEXT", "End the answer before this text; may be given again."),
]
SeedOpt = Annotated[int | None, option(SAMPLING, "--seed N", "Same seed, same answer.", INT)]
ThinkOpt = Annotated[
    bool | None,
    option(
        SAMPLING,
        "--think/--no-think",
        "Let the model think before it answers; default: yes, where it can.",
    ),
]
ThinkBudgetOpt = Annotated[
    int | None,
    option(
        SAMPLING,
        "--think-budget N",
        "Close the thinking after N tokens and go on with the answer.",
        INT,
    ),
]
SchemaOpt = Annotated[
    str | None, option(SAMPLING, "--schema FILE|JSON", "The answer is JSON of this schema.")
]
FormatOpt = Annotated[
    AnswerFormat,
    option(
        SAMPLING, "--format text|json", "json: the answer is a JSON object.", choice(AnswerFormat)
    ),
]


@dataclass
class SamplingOptions:
    """How answers are drawn, and their shape."""

    temperature: TemperatureOpt = None
    top_p: TopPOpt = None
    top_k: TopKOpt = None
    min_p: MinPOpt = None
    presence_penalty: PresencePenaltyOpt = None
    repetition_penalty: RepetitionPenaltyOpt = None
    max_tokens: MaxTokensOpt = None
    stop: StopOpt = None
    seed: SeedOpt = None
    think: ThinkOpt = None
    think_budget: ThinkBudgetOpt = None
    schema: SchemaOpt = None
    format: FormatOpt = AnswerFormat.TEXT

    def given(self) -> dict[str, Any]:
        """What was given of the numbers, as `SamplingParams` names it."""
        values = dict(vars(self))
        for name in ("think", "schema", "format"):
            del values[name]
        values["thinking_budget"] = values.pop("think_budget")
        values["stop"] = tuple(self.stop) if self.stop else None
        return {name: value for name, value in values.items() if value is not None}
