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
        "-t",
        "--temperature",
        parser=FLOAT,
        metavar="X",
        group=SAMPLING,
        help="0 to 2; 0 is greedy. Default: the model's, for Qwen3 0.6 thinking, 0.7 without.",
    ),
]
TopPOpt = Annotated[
    float | None,
    option(
        "--top-p",
        parser=FLOAT,
        metavar="X",
        group=SAMPLING,
        help="Keep the likeliest tokens of mass X.",
    ),
]
TopKOpt = Annotated[
    int | None,
    option(
        "--top-k",
        parser=INT,
        metavar="N",
        group=SAMPLING,
        help="Keep the N likeliest tokens; 0: all.",
    ),
]
MinPOpt = Annotated[
    float | None,
    option(
        "--min-p",
        parser=FLOAT,
        metavar="X",
        group=SAMPLING,
        help="Drop tokens less likely than X times the likeliest.",
    ),
]
PresencePenaltyOpt = Annotated[
    float | None,
    option(
        "--presence-penalty",
        parser=FLOAT,
        metavar="X",
        group=SAMPLING,
        help="-2 to 2; over 0 makes tokens already in the answer less likely.",
    ),
]
RepetitionPenaltyOpt = Annotated[
    float | None,
    option(
        "--repetition-penalty",
        parser=FLOAT,
        metavar="X",
        group=SAMPLING,
        help="Over 0 to 2; over 1 makes tokens of prompt and answer less likely.",
    ),
]
MaxTokensOpt = Annotated[
    int | None,
    option(
        "-n",
        "--max-tokens",
        parser=INT,
        metavar="N",
        group=SAMPLING,
        help="At most N tokens, thinking included; default: the room left in the context.",
    ),
]
StopOpt = Annotated[
    list[str] | None,
    option(
        "--stop",
        metavar="TEXT",
        group=SAMPLING,
        help="End the answer before this text; may be given again.",
    ),
]
SeedOpt = Annotated[
    int | None,
    option("--seed", parser=INT, metavar="N", group=SAMPLING, help="Same seed, same answer."),
]
ThinkOpt = Annotated[
    bool | None,
    option(
        "--think/--no-think",
        group=SAMPLING,
        help="Let the model think before it answers; default: yes, where it can.",
    ),
]
ThinkBudgetOpt = Annotated[
    int | None,
    option(
        "--think-budget",
        parser=INT,
        metavar="N",
        group=SAMPLING,
        help="Close the thinking after N tokens and go on with the answer.",
    ),
]
SchemaOpt = Annotated[
    str | None,
    option(
        "--schema", metavar="FILE|JSON", group=SAMPLING, help="The answer is JSON of this schema."
    ),
]
FormatOpt = Annotated[
    AnswerFormat,
    option(
        "--format",
        parser=choice(AnswerFormat),
        metavar="text|json",
        group=SAMPLING,
        help="json: the answer is a JSON object.",
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
