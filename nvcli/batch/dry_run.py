"""`--dry-run`: everything about an input that needs only the tokenizer, and how long it may take.

The time is an estimate from the model's size: prefill bound by compute, decode by reading the
weights and the keys and values once a step, for the GPU that is named in the answer. No GPU is
touched and torch is not imported.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.batch.feed import prepare_prompts
from nvcli.batch.prescan import MAX_LISTED, Duplicate
from nvcli.batch.progress import format_duration
from nvcli.batch.records import Failure, Record, failed, failure_of
from nvcli.batch.spelling import Teller
from nvcli.batch.walk import walk
from nvcli.errors import ContextLengthError, InvalidParameterError, NvcliError
from nvcli.protocol.pooling import EmbeddingRequest, check_dimensions
from nvcli.text.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvcli.batch.existing import ExistingOutput
    from nvcli.batch.options import BatchOptions
    from nvcli.models.config import ModelConfig
    from nvcli.text import Tokenizer

ASSUMED_OUTPUT_TOKENS = 256  # where a record sets no limit
# One H200: what kernels reach of 989 TFLOP/s and 4.8 TB/s, and what a step and each of its
# sequences cost beside that. The row of 1,500 records (batch_throughput.jsonl) took 12.5 s; 11.6 s
# are estimated.
_FLOPS_PER_S = 4.0e14
_BYTES_PER_S = 3.6e12
_STEP_S = 1.0e-3
_SEQUENCE_S = 8.0e-6
_ID_FIELDS: tuple[str, ...] = ("logit_bias", "allowed_token_ids", "stop_token_ids")
_MAX_NUM_SEQS = 256  # that run at once
_DTYPE_BYTES = 2


@dataclass(slots=True)
class DryRun:
    """What was found; token counts are of the good records."""

    num_records: int = 0
    num_good: int = 0
    num_resumed: int = 0  # that the output has already
    kinds: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)  # of the bad ones
    bad: list[Failure] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    max_prompt_tokens: int = 0
    output_tokens: int = 0  # at most, or assumed
    num_unlimited: int = 0
    num_sequences: int = 0
    histogram: Counter[int] = field(default_factory=Counter)  # power of two -> prompts
    estimate_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "command": "batch",
            "records": self.num_records,
            "good": self.num_good,
            "bad": sum(self.codes.values()),
            "resumed": self.num_resumed,
            "kinds": dict(self.kinds),
            "errors": dict(self.codes),
            "warnings": self.doubts,
            "prompt_tokens": self.prompt_tokens,
            "max_prompt_tokens": self.max_prompt_tokens,
            "max_output_tokens": self.output_tokens,
            "records_without_limit": self.num_unlimited,
            "histogram": {str(k): v for k, v in sorted(self.histogram.items())},
            "estimate_s": round(self.estimate_s, 3),
        }

    def lines(self, path: str) -> list[str]:
        """For people."""
        num_bad = sum(self.codes.values())
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())
        records = counted(self.num_records, "record")
        out = [f"{path}: {records}, {self.num_good:,} good, {num_bad:,} bad"]
        if self.num_resumed:
            out.append(f"in the output already: {self.num_resumed:,}")
        if kinds:
            out.append(f"kinds: {kinds}")
        for failure in self.bad:
            out.append(f"line {failure.line}: {failure.code}: {failure.message}")
        if num_bad > len(self.bad):
            out.append(f"and {num_bad - len(self.bad):,} more bad records")
        out += self.doubts
        out.append(f"prompt tokens: {self.prompt_tokens:,}, the longest {self.max_prompt_tokens:,}")
        out += self._bars()
        limit = f"output tokens: at most {self.output_tokens:,}"
        if self.num_unlimited:
            limit += (
                f" ({ASSUMED_OUTPUT_TOKENS} assumed for {self.num_unlimited:,} without a limit)"
            )
        out.append(limit)
        out.append(f"time: about {format_duration(self.estimate_s)} on one H200")
        return out

    def _bars(self) -> list[str]:
        most = max(self.histogram.values(), default=1)
        return [
            f"  <= {top:>8,} {count:>10,} {'#' * max(1, 40 * count // most)}"
            for top, count in sorted(self.histogram.items())
        ]


def dry_run(
    options: BatchOptions,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    existing: ExistingOutput | None = None,
) -> DryRun:
    """Go through the input as a run would, without an engine. Raises what `read_rows` raises.

    existing: the output that a run would go on with; what is in it costs nothing.
    """
    found = DryRun()
    teller = Teller(found.doubts.append)
    for item in walk(options, existing):
        if not item.is_wanted:
            continue
        found.num_records += 1
        record = item.parse()
        if isinstance(record, Record):
            teller.add(record.line, record.doubts)
        if item.assigned.first_line is not None:
            duplicate = Duplicate(record.id, item.assigned.first_line, record.line)
            found.duplicates.append(duplicate)
            _add_bad(found, failed(record, "duplicate_id", duplicate.message))
        elif item.is_finished:
            found.num_resumed += 1
        elif isinstance(record, Failure):
            _add_bad(found, record)
        else:
            _add(found, record, model, tokenizer, max_model_len)
    found.estimate_s = estimate(found, model)
    return found


def _add_bad(found: DryRun, failure: Failure) -> None:
    found.codes[failure.code] += 1
    if len(found.bad) < MAX_LISTED:
        found.bad.append(failure)


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """In the engine's words; that looks at them with numpy, which a dry run does not import."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidParameterError(
                f"{param} holds token id {token_id}; the vocabulary ends at {vocab_size - 1}",
                param=param,
            )


def _add(
    found: DryRun,
    record: Record,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    max_model_len: int,
) -> None:
    """What the engine would refuse is refused here, in its order and its words."""
    known = model.vocab_size if tokenizer is None else min(model.vocab_size, tokenizer.size)
    asked, limit = record.request, record.sampling.get("max_tokens")
    try:
        prompts = prepare_prompts(record, tokenizer, max_model_len)
        if isinstance(asked, EmbeddingRequest):
            check_dimensions(asked, model.hidden_size)
            limit = 0
        others = _ID_FIELDS  # of the record: behind its first prompt
        for prompt in prompts:
            size = len(prompt.token_ids)
            if too_long := ContextLengthError.of_prompt(size, max_model_len, needs_room=limit != 0):
                raise too_long
            _check_ids("prompt", prompt.token_ids, known)
            for name in others:
                _check_ids(name, record.sampling.get(name) or (), known)
            others = ()
    except NvcliError as error:
        _add_bad(found, failure_of(record, error))
        return
    found.num_good += 1
    found.kinds[str(record.kind)] += 1
    found.num_unlimited += limit is None
    for prompt in prompts:
        size = len(prompt.token_ids)
        n = record.sampling.get("best_of") or record.sampling.get("n") or 1
        room = max_model_len - size
        found.prompt_tokens += size
        found.max_prompt_tokens = max(found.max_prompt_tokens, size)
        found.output_tokens += n * min(ASSUMED_OUTPUT_TOKENS if limit is None else limit, room)
        found.num_sequences += n
        found.histogram[1 << max(0, size - 1).bit_length()] += 1


def estimate(found: DryRun, model: ModelConfig) -> float:
    """Seconds for prompts and outputs on one H200 in 16 bits (or fp8 weights), weights loaded."""
    if not found.num_sequences:
        return 0.0
    parameters = num_parameters(model)
    prefill_s = 2 * parameters * found.prompt_tokens / _FLOPS_PER_S
    batch = min(_MAX_NUM_SEQS, found.num_sequences)
    steps = max(found.output_tokens / batch, found.output_tokens / found.num_sequences)
    kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * _DTYPE_BYTES
    context = (found.prompt_tokens + found.output_tokens / 2) / found.num_sequences
    head = model.vocab_size * model.hidden_size
    weight_bytes = 1 if model.is_fp8 else _DTYPE_BYTES  # of the layers
    weights = model.linear_params_read(batch) * weight_bytes + head * _DTYPE_BYTES
    step_bytes = weights + batch * context * kv_bytes
    step_s = max(step_bytes / _BYTES_PER_S, 2 * parameters * batch / _FLOPS_PER_S)
    step_s += _STEP_S + batch * _SEQUENCE_S
    return prefill_s + steps * step_s


def num_parameters(model: ModelConfig) -> int:
    """Weights that a token passes through, embedding lookups left out."""
    return model.linear_params + model.vocab_size * model.hidden_size
