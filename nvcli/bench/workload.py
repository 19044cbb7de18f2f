"""What is sent, and when: decided before the first request, from one seed.

Three streams of random numbers - arrivals, lengths, content - come from the seed, so that another
rate does not change the prompts. Prompts are token ids and never pass through text, unless they are
read from a file. A cold run salts the content, so nothing of an older run is in the prefix cache;
lengths stay.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvcli.bench.prompts import digest_of, read_prompts
from nvcli.bench.stats import equal_parts
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST = 10_000_000  # tokens
WARM = 64  # prompts of a warm run; more may not fit its cache


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts: `1024`, `LO:HI` (uniform), `geometric:MEAN`, `lognormal:MEAN:CV`."""

    text: str
    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises `UsageError`."""
        name, *rest = text.strip().split(":")
        try:
            if name in ("geometric", "lognormal"):
                a, b = float(rest[0]), float(rest[1]) if name == "lognormal" else 0.0
                is_meant = 1 <= a <= LONGEST and 0 <= b <= 100  # which no NaN is
                if len(rest) != (2 if name == "lognormal" else 1) or not is_meant:
                    raise ValueError
                return cls(text, name, a, b)
            low = int(name)
            high = int(rest[0]) if rest else low
            if len(rest) > 1 or not 1 <= low <= high <= LONGEST:
                raise ValueError
        except (ValueError, IndexError):
            raise UsageError(
                f"{text!r} is no length",
                hint="Write 1024, 128:2048, geometric:256 or lognormal:256:0.5.",
            ) from None
        return cls(text, "uniform", low, high)

    def __str__(self) -> str:
        return self.text

    @property
    def mean(self) -> float:
        return (self.a + self.b) / 2 if self.kind == "uniform" else self.a

    @property
    def typical(self) -> list[int]:
        """A few lengths, equally likely, that stand for all."""
        if self.kind == "uniform" and self.a == self.b:
            return [int(self.a)]
        rng = np.random.default_rng(0)
        return equal_parts([self.draw(rng) for _ in range(800)])

    @property
    def least(self) -> int:
        return int(self.a) if self.kind == "uniform" else 1

    def draw(self, rng: np.random.Generator) -> int:
        if self.kind == "uniform":
            return int(rng.integers(int(self.a), int(self.b) + 1))
        if self.kind == "geometric":
            return min(int(rng.geometric(1 / self.a)), LONGEST)
        sigma = math.sqrt(math.log(1 + self.b**2))
        drawn = float(rng.lognormal(math.log(self.a) - sigma**2 / 2, sigma))
        return max(1, round(min(drawn, LONGEST)))


@dataclass(frozen=True, slots=True)
class Arrival:
    """Gaps between sends: `poisson`, `constant`, `gamma:CV` (shape 1 / CV^2)."""

    text: str
    cv: float

    @classmethod
    def parse(cls, text: str) -> Arrival:
        """Raises `UsageError`."""
        name, _, value = text.strip().partition(":")
        try:
            cv = {"poisson": 1.0, "constant": 0.0}[name] if not value else float(value)
            if (value and name != "gamma") or not 0 <= cv < 100:
                raise ValueError
        except (KeyError, ValueError):
            raise UsageError(
                f"{text!r} is no arrival", hint="Write poisson, constant or gamma:2."
            ) from None
        return cls(text, cv)

    def __str__(self) -> str:
        return self.text

    def gaps(self, rate: float, rng: np.random.Generator) -> Iterator[float]:
        if self.cv == 0:
            while True:
                yield 1 / rate
        shape = 1 / self.cv**2
        while True:
            yield float(rng.gamma(shape, 1 / (rate * shape)))


@dataclass(slots=True)
class Planned:
    """One request."""

    index: int
    prompt: list[int] | str | list[dict[str, Any]]
    n_out: int
    n_in: int | None = None  # known for token ids
    turn: int = 1
    later: list[tuple[list[int], int]] = field(default_factory=list)  # (what is added, n_out)

    @property
    def id(self) -> str:
        return f"r{self.index}" if self.turn == 1 else f"r{self.index}.{self.turn}"

    def next_turn(self, answer: list[int], max_len: int | None) -> Planned | None:
        """The conversation goes on: this prompt, its answer, and what is said next. None at its
        end, or where the context is full."""
        if not self.later:
            return None
        (added, n_out), *later = self.later
        assert isinstance(self.prompt, list), "conversations are token ids"
        prompt = [*self.prompt, *answer, *added]
        if max_len is not None:
            if len(prompt) >= max_len:
                return None
            n_out = min(n_out, max_len - len(prompt))
        return Planned(self.index, prompt, n_out, n_in=len(prompt), turn=self.turn + 1, later=later)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that decides the prompts and answers; `hash` names it."""

    in_len: Lengths = field(default_factory=lambda: Lengths.parse("128"))
    out_len: Lengths = field(default_factory=lambda: Lengths.parse("64"))
    data: str = "random"
    prefix: str | None = None
    seed: int = 0
    cache: str = "cold"
    turns: int = 1

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise UsageError("--turns must be over 0", param="turns")
        if self.seed < 0:
            raise UsageError("--seed must not be negative", param="seed")
        if self.turns > 1 and (self.data != "random" or self.cache == "warm"):
            raise UsageError(
                "--turns is for --data random with a cold or kept cache", param="turns"
            )
        parse_prefix(self.prefix)
        kind = self.data.partition(":")[0]
        if kind not in ("random", "jsonl", "sharegpt"):
            raise UsageError(
                f"--data {self.data}: it must be random, jsonl:PATH or sharegpt:PATH", param="data"
            )

    @property
    def text(self) -> str:
        source = "random" if self.data == "random" else self.data.partition(":")[0]
        prefix = f", prefix {self.prefix}" if self.prefix else ""
        asked = "" if self.data != "random" else f"{self.in_len.text} "
        turns = f", {self.turns} turns" if self.turns > 1 else ""
        return f"{source} {asked}-> {self.out_len.text}{prefix}{turns}, {self.cache} cache"

    def as_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "in_len": self.in_len.text,
            "out_len": self.out_len.text,
            "data": self.data if self.data == "random" else _file_name(self.data),
            "prefix": self.prefix,
            "cache": self.cache,
            "seed": self.seed,
        }
        if self.turns > 1:
            value["turns"] = self.turns
        content = {**value, "data": self.data if self.data == "random" else digest_of(self.data)}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return {**value, "hash": digest[:6], "text": self.text}

    def check_fits(self, max_len: int | None) -> None:
        """Raises `UsageError` where no request would be as long as asked for."""
        asked = parse_prefix(self.prefix)[0] + self.in_len.least
        if self.data == "random" and max_len is not None and asked + self.out_len.least > max_len:
            raise UsageError(
                f"{asked:,} tokens in and {self.out_len.least:,} out do not fit the context, "
                f"{max_len:,} tokens",
                hint="Lower --in-len or --out-len, or raise --max-model-len.",
                param="in_len",
            )

    def requests(
        self, *, vocab_size: int, max_len: int | None = None, salt: int = 0
    ) -> Iterator[Planned]:
        """Requests without end, in order. Raises `UsageError` for a file that is none.

        Of a warm run prompts repeat: the prefixes, or `WARM` whole ones; `warm_up` sends them once.
        """
        lengths = np.random.default_rng([self.seed, 1])
        content = np.random.default_rng([self.seed, 2, 0 if self.cache == "keep" else salt])
        prefix_len, groups = parse_prefix(self.prefix)
        prefixes = [random_ids(content, vocab_size, prefix_len) for _ in range(groups)]
        stored = None if self.data == "random" else read_prompts(self.data)
        repeats = self.cache == "warm" and not prefixes
        if stored is not None and repeats:
            stored = stored[:WARM]
        warm: list[list[int]] = []
        for index in itertools.count():
            n_in, n_out = self.in_len.draw(lengths), self.out_len.draw(lengths)
            if stored is not None:
                yield Planned(index, stored[index % len(stored)], n_out)
                continue
            if repeats and len(warm) == WARM:
                prompt = warm[index % WARM]
            else:
                prompt = random_ids(content, vocab_size, n_in)
                warm += [prompt] if repeats else []
            if prefixes:
                prompt = prefixes[index % groups] + prompt
            later = [
                (
                    random_ids(content, vocab_size, self.in_len.draw(lengths)),
                    self.out_len.draw(lengths),
                )
                for _ in range(self.turns - 1)
            ]
            prompt, n_out = cut_to(max_len, prompt, n_out)
            yield Planned(index, prompt, n_out, n_in=len(prompt), later=later)

    def warm_up(
        self, *, vocab_size: int, max_len: int | None = None, salt: int = 0
    ) -> Iterator[Planned]:
        """What a warm run sends before it is measured, one token each; nothing for others."""
        if self.cache != "warm":
            return
        _, groups = parse_prefix(self.prefix)
        planned = self.requests(vocab_size=vocab_size, max_len=max_len, salt=salt)
        stored = 0 if self.data == "random" else len(read_prompts(self.data))
        for request in itertools.islice(planned, groups or min(stored or WARM, WARM)):
            request.n_out = 1
            yield request

    def schedule(self, rate: float, arrival: Arrival, duration_s: float) -> Iterator[float]:
        """Moments of an open loop, in seconds from the start."""
        at = 0.0
        for gap in arrival.gaps(rate, np.random.default_rng([self.seed, 0])):
            at += gap
            if at > duration_s:
                return
            yield at


def parse_prefix(text: str | None) -> tuple[int, int]:
    """`LEN:GROUPS` -> (tokens, how many different ones). Raises `UsageError`."""
    if text is None:
        return 0, 0
    length, _, groups = text.partition(":")
    try:
        found = int(length), int(groups or 1)
        if min(found) < 1:
            raise ValueError
    except ValueError:
        raise UsageError(f"{text!r} is no prefix", hint="Write LEN:GROUPS, as 512:8.") from None
    return found


def cut_to(max_len: int | None, prompt: list[int], n_out: int) -> tuple[list[int], int]:
    """What fits the context, with an answer of one token at least."""
    if max_len is None:
        return prompt, n_out
    prompt = prompt[: max(max_len - 1, 1)]
    return prompt, max(min(n_out, max_len - len(prompt)), 1)


def random_ids(rng: np.random.Generator, vocab_size: int, n: int) -> list[int]:
    ids: list[int] = rng.integers(0, vocab_size, n).tolist()
    return ids


def _file_name(data: str) -> str:
    kind, _, path = data.partition(":")
    return f"{kind}:{Path(path).name}"
