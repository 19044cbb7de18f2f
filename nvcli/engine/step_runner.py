"""Carries out step plans on one device, with a model that is loaded.

Hot path: yes.

`launch` enqueues everything a step needs - deltas, inputs, forward pass, sampling, the update of
the slots, the copy back to the host - on one stream and never waits; `collect` waits for that
step's event and reads. On the CPU the work is done when `launch` returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nvcli.engine.logprobs import pack_logprobs, packed_width, unpack_logprobs
from nvcli.engine.step import StepPlan, StepResult
from nvcli.errors import EngineClosedError, EngineError

if TYPE_CHECKING:
    from nvcli.engine.cuda_graph import GraphRunner
    from nvcli.engine.device_state import DeviceState, StepInputs
    from nvcli.engine.sampler import Sampler
    from nvcli.engine.step_sampler import StepSampler
    from nvcli.kernels.attention import AttentionBackend
    from nvcli.layers.forward_batch import ForwardBatch


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of all tokens, [T, E]; where the batch `ends_early`, [R, E], only those of
        the tokens at `logits_indices`.
        """
        ...

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, E] -> [R, V], into `out` where it is given."""
        ...

    def kv_limits(self) -> Tensor:
        """[L, 2, Hk]: bounds on keys and values; asked for where the cache is in fp8."""
        ...


@dataclass(slots=True)
class RunnerTicket:
    """A launched step and the way to its result."""

    plan: StepPlan
    sample_rows: list[int] = field(default_factory=list)  # rows of the plan
    output: Tensor | None = None  # int32 on the host: samples, then packed log-probabilities
    event: Any = None  # None on the CPU
    logprob_samples: list[int] = field(default_factory=list)  # indices into sample_rows
    logprob_k: int = 0
    prompt_rows: list[tuple[int, int, int]] = field(default_factory=list)  # (row, tokens, k)
    pooled_rows: list[tuple[int, int]] = field(default_factory=list)  # (row, floats)


class StepRunner:
    """The half of `ModelRunner` that runs steps, with the attributes that the other half loads."""

    device: torch.device
    model: Model
    vocab_size: int  # ids the tokenizer knows
    attention: AttentionBackend
    state: DeviceState
    sampler: Sampler
    graphs: GraphRunner | None  # captured steps, on CUDA
    _step_sampler: StepSampler | None  # the sampling kernel and what stands in for it, on CUDA
    reports: bool = True  # whether results are copied to the host: one rank of a group does it
    _is_closed: bool

    def launch(self, plan: StepPlan) -> RunnerTicket:
        """Enqueue a step; does not wait for the device.

        Raises `EngineError` when the device has no memory for it: the plan's rows have not run,
        everything else goes on.
        """
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        try:
            with torch.inference_mode():
                return self._launch(plan)
        except torch.OutOfMemoryError as error:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            raise EngineError(
                f"a step of {plan.num_tokens} tokens ran out of device memory",
                hint="Lower --max-num-seqs or --gpu-memory-utilization.",
            ) from error

    def _launch(self, plan: StepPlan) -> RunnerTicket:
        replayed = self.graphs.run(plan) if self.graphs is not None else None
        if replayed is not None:
            ticket = RunnerTicket(plan, list(range(len(plan.rows))))
            more = self._logprobs(ticket, replayed.logits, replayed.samples)
            if replayed.on_host is None or more:
                return self._send(ticket, [replayed.samples, *more])
            return self._send(ticket, [], replayed.on_host)
        inputs = self.state.prepare(plan, self.attention)
        if self._step_sampler is not None:
            self._step_sampler.admit(plan)
        if inputs is None:
            return RunnerTicket(plan)
        assert inputs.batch is not None, "prepare makes a batch"
        batch, num_samples = inputs.batch, len(inputs.sample_rows)
        batch.ends_early = 0 < num_samples < plan.num_tokens and not plan.reads_hidden_states
        hidden = self.model.forward(batch)  # [T, E], or [R, E]
        ticket = RunnerTicket(plan, inputs.sample_rows)
        pieces: list[Tensor] = []
        if inputs.sample_rows:
            is_chosen = hidden.shape[0] == num_samples
            of_samples = hidden if is_chosen else hidden[batch.logits_indices]
            logits = self.model.compute_logits(of_samples)  # [R, V]
            sampled = self._sample(plan, inputs, logits)
            pieces += [sampled, *self._logprobs(ticket, logits, sampled)]
        pieces += self._prompt_logprobs(ticket, inputs, hidden)
        pieces += self._pool(ticket, hidden)
        return self._send(ticket, pieces)

    def _sample(self, plan: StepPlan, inputs: StepInputs, logits: Tensor) -> Tensor:
        """Sample and write the tokens to their slots.  logits: [R, V] -> [R] int32."""
        if self._step_sampler is not None:
            rows, slots, positions = (
                inputs.sample_rows,
                inputs.sample_slots,
                inputs.sample_positions,
            )
            out = torch.empty(len(rows), dtype=torch.int32, device=self.device)
            self._step_sampler.run_kernel(logits, slots, positions, out)
            self._step_sampler.finish(plan, rows, logits, slots, positions, out)
            return out
        slots_of_rows = [plan.rows[i].slot for i in inputs.sample_rows]
        sampled = self.sampler.sample(logits, slots_of_rows, inputs)  # [R]
        self.state.store_samples(plan, inputs, sampled)
        return sampled.to(torch.int32)

    def _send(
        self, ticket: RunnerTicket, pieces: list[Tensor], on_host: Tensor | None = None
    ) -> RunnerTicket:
        """Start the copy of a step's results to the host.

        pieces:   the results on the device, int32, [...] each
        on_host:  the same, where a captured step writes them to the host itself
        """
        if on_host is not None and self.reports:
            if self.device.type == "cuda":
                ticket.output = on_host
                ticket.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ticket.event.record()
            else:
                ticket.output = on_host.clone()
        elif pieces and self.reports:
            output = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            if self.device.type == "cuda":
                ticket.output = torch.empty(output.shape, dtype=torch.int32, pin_memory=True)
                ticket.output.copy_(output, non_blocking=True)
                ticket.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ticket.event.record()
            else:
                ticket.output = output.clone()  # the next step may write where it stands
        return ticket

    def _logprobs(self, ticket: RunnerTicket, logits: Tensor, sampled: Tensor) -> list[Tensor]:
        """Log-probabilities of the samples that want them, packed and flat."""
        wanted: list[int] = []
        rows = ticket.plan.rows
        for index, i in enumerate(ticket.sample_rows):
            k = rows[i].seq.params.logprobs
            if k is not None and rows[i].samples:
                wanted.append(index)
                ticket.logprob_k = max(ticket.logprob_k, k)
        if not wanted:
            return []
        ticket.logprob_samples = wanted
        ticket.logprob_k = min(ticket.logprob_k, self.vocab_size)
        if len(wanted) < logits.shape[0]:
            index_of = self.state.staging.upload_index(wanted)
            logits, sampled = logits[index_of], sampled[index_of]
        ids = sampled.long().clamp(min=0)  # -1: nothing could be sampled
        return [pack_logprobs(logits, ids, ticket.logprob_k, self.vocab_size).flatten()]

    def _prompt_logprobs(
        self, ticket: RunnerTicket, inputs: StepInputs, hidden: Tensor
    ) -> list[Tensor]:
        """Log-probabilities of prompt tokens start + 1 .. start + n, of the rows that want them."""
        pieces: list[Tensor] = []
        first = 0  # of the row's tokens in the step
        for index, row in enumerate(ticket.plan.rows):
            k = row.seq.params.prompt_logprobs
            count = min(row.start + row.n, row.seq.num_prompt_tokens - 1) - row.start
            if k is not None and count > 0:
                k = min(k, self.vocab_size)
                targets = self.state.tokens[row.slot, row.start + 1 : row.start + 1 + count]
                packed = pack_logprobs(
                    *(hidden[first : first + count], targets.long(), k),
                    *(self.vocab_size, self.model.compute_logits),
                )
                pieces.append(packed.flatten())
                ticket.prompt_rows.append((index, count, k))
            first += row.n
        return pieces

    def _pool(self, ticket: RunnerTicket, hidden: Tensor) -> list[Tensor]:
        """What rows that pool ask of their last prompt token, as the bits of float32."""
        pieces: list[Tensor] = []
        end = 0  # of the row's tokens in the step
        for index, row in enumerate(ticket.plan.rows):
            end += row.n
            ids = row.seq.pools
            if ids is None or row.start + row.n != row.seq.num_prompt_tokens:
                continue
            values = hidden[end - 1 : end]  # [1, E]
            if ids:
                values = self.model.compute_logits(values)[
                    :, self.state.staging.upload_index(list(ids))
                ]
            pieces.append(values[0].float().contiguous().view(torch.int32))
            ticket.pooled_rows.append((index, values.shape[1]))
        return pieces

    def collect(self, ticket: RunnerTicket) -> StepResult:
        """Wait for the step and read it."""
        if ticket.event is not None:
            ticket.event.synchronize()  # the one wait of a step
        rows = ticket.plan.rows
        result = StepResult(token_ids=[-1] * len(rows))
        if ticket.output is None:
            return result
        num_samples = len(ticket.sample_rows)
        sampled: list[int] = ticket.output[:num_samples].tolist()
        for row, token_id in zip(ticket.sample_rows, sampled, strict=True):
            result.token_ids[row] = token_id
        if not (ticket.logprob_samples or ticket.prompt_rows or ticket.pooled_rows):
            return result

        offset, values = num_samples, ticket.output.numpy()
        width = packed_width(ticket.logprob_k)
        for index in ticket.logprob_samples:
            row = ticket.sample_rows[index]
            packed = values[offset : offset + width].reshape(1, width)
            offset += width
            if sampled[index] < 0:
                continue
            k = rows[row].seq.params.logprobs or 0
            (result.logprobs[row],) = unpack_logprobs(packed, sampled[index : index + 1], k)
        for row, count, k in ticket.prompt_rows:
            width = packed_width(k)
            packed = values[offset : offset + count * width].reshape(count, width)
            offset += count * width
            start = rows[row].start + 1
            targets = rows[row].seq.prompt_token_ids[start : start + count]
            result.prompt_logprobs[row] = unpack_logprobs(packed, targets, k)
        for row, width in ticket.pooled_rows:
            result.pooled[row] = values[offset : offset + width].tobytes()
            offset += width
        return result
