"""The model runner: carries out step plans on one device.

Hot path: yes (`launch`, `collect`).

`launch` enqueues everything a step needs - deltas, inputs, forward pass, sampling, the update of
the slots, the copy back to the host - on one stream and never waits; `collect` waits for that
step's event and reads. On the CPU the work is done when `launch` returns.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nvcli import kernels
from nvcli.engine.device_state import DeviceState
from nvcli.engine.kv_cache import (
    DEFAULT_SHARE,
    KVCache,
    KVCacheSpec,
    available_memory,
    check_model_len,
    format_bytes,
    size_pool,
)
from nvcli.engine.prompt_logprobs import (
    pack_logprobs,
    pack_prompt_logprobs,
    packed_width,
    unpack_logprobs,
)
from nvcli.engine.sampler import Sampler
from nvcli.engine.sequence import Sequence
from nvcli.engine.step import Row, SlotInit, StepPlan, StepResult
from nvcli.errors import DeviceError, EngineClosedError, EngineError, OutOfMemoryError
from nvcli.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nvcli.config import EngineConfig
    from nvcli.engine.cuda_graph import GraphRunner
    from nvcli.engine.device_state import StepInputs
    from nvcli.engine.step_sampler import StepSampler
    from nvcli.kernels.attention import AttentionBackend
    from nvcli.layers.forward_batch import ForwardBatch
    from nvcli.models.config import ModelConfig

MAX_NUM_SEQS = {"cuda": 256, "cpu": 16}
MAX_NUM_BATCHED_TOKENS = {"cuda": 16_384, "cpu": 1_024}


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: ForwardBatch) -> Tensor: ...  # -> [T, E]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, E] -> [R, V], into `out` where it is given."""
        ...


@dataclass(frozen=True, slots=True)
class StartupReport:
    """What was loaded, and how long each stage took."""

    device: str
    dtype: str
    attention_backend: str
    attention_reason: str
    max_model_len: int
    num_blocks: int
    block_size: int
    pool_bytes: int
    weights_bytes: int
    num_graphs: int = 0
    graph_bytes: int = 0
    stage_s: dict[str, float] = field(default_factory=dict)


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


def resolve_device(name: str) -> torch.device:
    """Raises `DeviceError` when CUDA is asked for and there is none."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            "--device cuda: there is no CUDA device, or torch was built without CUDA",
            hint="Use --device cpu.",
            param="device",
        )
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str, device: torch.device, checkpoint_dtype: str) -> torch.dtype:
    """`auto`: float32 on the CPU; on CUDA as in the checkpoint, bfloat16 for one in float32."""
    if name == "auto":
        is_half = checkpoint_dtype in ("float16", "bfloat16")
        name = "float32" if device.type == "cpu" else checkpoint_dtype if is_half else "bfloat16"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


class ModelRunner:
    """Implements `StepDevice`. One thread at a time; plans run in launch order."""

    graphs: GraphRunner | None  # captured steps, on CUDA
    _step_sampler: StepSampler | None  # the sampling kernel and what stands in for it, on CUDA

    def __init__(
        self,
        folder: Path | None,
        model_config: ModelConfig,
        config: EngineConfig,
        *,
        vocab_size: int | None = None,
        model: Model | None = None,
        attention: AttentionBackend | None = None,
    ) -> None:
        """Load the model and reserve the KV cache.

        Args:
            folder: the checkpoint; not read when `model` is given.
            vocab_size: ids the tokenizer knows; the model's may be padded beyond it.
            model, attention: used instead of the checkpoint's and the fastest.

        Raises:
            UsageError: `max_model_len` is beyond the model.
            DeviceError: there is no such device.
            WeightsError: the checkpoint cannot be read.
            OutOfMemoryError: the weights or the smallest useful KV cache do not fit.
        """
        self._is_closed = False
        self.config = config
        self.model_config = model_config
        self.device = resolve_device(config.device)
        kind = self.device.type
        self.dtype = resolve_dtype(config.dtype, self.device, model_config.dtype)
        self.vocab_size = min(vocab_size or model_config.vocab_size, model_config.vocab_size)
        self.max_num_seqs = config.max_num_seqs or MAX_NUM_SEQS[kind]
        self.max_num_batched_tokens = config.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[kind]
        is_ahead = kind == "cuda" if config.run_ahead is None else config.run_ahead
        self.depth = 1 if is_ahead else 0
        self.block_size = config.block_size
        self.max_model_len = check_model_len(config.max_model_len, model_config.max_model_len)
        kv_dtype = resolve_dtype(config.kv_cache_dtype, self.device, model_config.dtype)
        self._spec = KVCacheSpec(
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            block_size=config.block_size,
            dtype=self.dtype if config.kv_cache_dtype == "auto" else kv_dtype,
        )
        stage_s: dict[str, float] = {}
        memory_before = self._free_memory()
        with _stage(stage_s, "weights"):
            self.model = model if model is not None else self._load_model(folder)
        self._weights_bytes = _num_bytes(self.model)
        with _stage(stage_s, "attention"):
            self.attention, reason = (
                (attention, "given") if attention is not None else self._select_attention()
            )
        with _stage(stage_s, "profile"):
            self.num_blocks = self._settle_num_blocks(memory_before)
        with _stage(stage_s, "kv_cache"):
            self._allocate(self.num_blocks)
        with _stage(stage_s, "graphs"):
            graph_bytes = self._capture_graphs()
        self.startup = StartupReport(
            device=torch.cuda.get_device_name(self.device) if kind == "cuda" else "cpu",
            dtype=str(self.dtype).removeprefix("torch."),
            attention_backend=getattr(self.attention, "name", type(self.attention).__name__),
            attention_reason=reason,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            pool_bytes=self.kv_cache.nbytes,
            weights_bytes=self._weights_bytes,
            num_graphs=self.graphs.num_graphs if self.graphs is not None else 0,
            graph_bytes=graph_bytes,
            stage_s=stage_s,
        )

    # --- loading ---------------------------------------------------------------------------------

    def _load_model(self, folder: Path | None) -> Model:
        from nvcli.models import load_model

        assert folder is not None, "a folder, or a model"
        return load_model(
            folder,
            self.model_config,
            device=self.device,
            dtype=self.dtype,
            load_format=self.config.load_format,
        )

    def _select_attention(self) -> tuple[AttentionBackend, str]:
        from nvcli.kernels.attention import select_backend

        return select_backend(
            self.config.attention_backend,
            device=self.device,
            dtype=self._spec.dtype,
            head_dim=self._spec.head_dim,
            block_size=self.block_size,
        )

    def _free_memory(self) -> int:
        if self.device.type == "cpu":
            return available_memory()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def _settle_num_blocks(self, memory_before: int) -> int:
        """Blocks for the KV cache; may lower `max_model_len` to what they hold."""
        if self.config.num_blocks is not None:
            return self.config.num_blocks
        num_blocks, self.max_model_len = size_pool(
            self._spec,
            budget_bytes=self._kv_budget(memory_before),
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            is_len_requested=self.config.max_model_len is not None,
        )
        return num_blocks

    def _kv_budget(self, memory_before: int) -> int:
        """Bytes for the KV cache: the share of memory, less what everything else takes."""
        share = self.config.memory_utilization or DEFAULT_SHARE[self.device.type]
        if self.device.type == "cpu":
            return int(share * memory_before) - self._weights_bytes
        peak = self._profile()
        free, total = torch.cuda.mem_get_info(self.device)
        # tables that the first request with penalties or a bias brings
        tables = (self.max_num_seqs + 1) * self.model_config.vocab_size * 9
        return int(share * total) - (total - free) - peak - tables

    def _profile(self) -> int:
        """Run the largest steps once; -> the bytes they took beside the weights. Also compiles
        what is compiled at first use.
        """
        self._allocate(0)
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            for plan in self._profile_plans():
                self.collect(self.launch(plan))
        except (EngineError, torch.OutOfMemoryError) as error:
            raise OutOfMemoryError(
                f"a step of {self.max_num_batched_tokens} tokens does not fit beside the weights "
                f"({format_bytes(self._weights_bytes)})",
                hint="Lower --max-num-batched-tokens or --max-num-seqs, or use a smaller model.",
            ) from error
        peak = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        return peak + self._graph_bytes_bound()

    def _graph_bytes_bound(self) -> int:
        """What all CUDA graphs may take: measured on the largest of each kind, then dropped."""
        graphs = self._make_graphs()
        if graphs is None:
            return 0
        from nvcli.engine.cuda_graph import Capture

        before = self._free_memory()
        with torch.inference_mode():
            graphs.capture(Capture(self.device), limit=1)
        bound = graphs.bytes_beyond(before - self._free_memory()) + graphs.buffer_bytes
        del graphs
        gc.collect()
        torch.cuda.empty_cache()
        return bound

    def _make_graphs(self) -> GraphRunner | None:
        if self._step_sampler is None or self.config.enforce_eager:
            return None
        if getattr(self.attention, "name", "") != "triton":  # others plan on the host
            return None
        from nvcli.engine.cuda_graph import GraphRunner

        return GraphRunner(
            self.model,
            self.state,
            self._step_sampler,
            self.attention,
            max_num_batched_tokens=self.max_num_batched_tokens,
            dtype=self.dtype,
        )

    def _capture_graphs(self) -> int:
        """-> the bytes they take."""
        self.graphs = self._make_graphs()
        if self.graphs is None:
            return 0
        from nvcli.engine.cuda_graph import Capture

        before = self._free_memory()
        with torch.inference_mode():
            self.graphs.capture(Capture(self.device))
        torch.cuda.synchronize(self.device)
        return before - self._free_memory() + self.graphs.buffer_bytes

    def _profile_plans(self) -> Iterator[StepPlan]:
        """All slots decoding, then the token budget as prompts; only the dummy block is read."""
        budget = self.max_num_batched_tokens
        longest = min(budget, self.max_model_len - 1)
        params = SamplingParams(temperature=1.0, top_p=0.9)
        for num_rows, n in (
            (min(self.max_num_seqs, budget), 1),
            (min(self.max_num_seqs, -(-budget // longest)), longest),
        ):
            blocks = [self.kv_cache.dummy_block] * self._spec.blocks_for(n)
            plan = StepPlan(step_id=-1)
            for slot in range(num_rows):
                seq = Sequence(-1, [0] * n, params, 1, 0, block_table=blocks)
                plan.slot_inits.append(SlotInit(slot, [0] * n, [], params, 0, frozenset()))
                plan.rows.append(Row(seq, 0, slot, 0, n, samples=True, is_stored=True))
            yield plan

    def _allocate(self, num_blocks: int) -> None:
        self.kv_cache = KVCache(self._spec, num_blocks, self.device)
        self.state = DeviceState(
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            padded_vocab_size=self.model_config.vocab_size,
            kv_cache=self.kv_cache,
            device=self.device,
        )
        self.sampler = Sampler(self.state, self.vocab_size)
        self.graphs = None
        self._step_sampler = None
        if self.device.type == "cuda" and kernels.uses_triton():
            from nvcli.engine.step_sampler import StepSampler

            self._step_sampler = StepSampler(self.state, self.sampler, self.vocab_size)

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        del self.model, self.kv_cache, self.state, self.sampler, self.graphs, self._step_sampler
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- a step ----------------------------------------------------------------------------------

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
                hint="Lower --max-num-batched-tokens or --memory-utilization.",
            ) from error

    def _launch(self, plan: StepPlan) -> RunnerTicket:
        replayed = self.graphs.run(plan) if self.graphs is not None else None
        if replayed is not None:
            logits, sampled = replayed  # of all rows
            ticket = RunnerTicket(plan, list(range(len(plan.rows))))
            return self._send(ticket, [sampled, *self._logprobs(ticket, logits, sampled)])
        inputs = self.state.prepare(plan, self.attention)
        if self._step_sampler is not None:
            self._step_sampler.admit(plan)
        if inputs is None:
            return RunnerTicket(plan)
        assert inputs.batch is not None, "prepare makes a batch"
        hidden = self.model.forward(inputs.batch)  # [T, E]
        ticket = RunnerTicket(plan, inputs.sample_rows)
        pieces: list[Tensor] = []
        if inputs.sample_rows:
            if len(inputs.sample_rows) < hidden.shape[0]:
                logits = self.model.compute_logits(hidden[inputs.batch.logits_indices])
            else:
                logits = self.model.compute_logits(hidden)  # [R, V]
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

    def _send(self, ticket: RunnerTicket, pieces: list[Tensor]) -> RunnerTicket:
        """Start the copy of a step's results to the host.  pieces: int32, [...] each."""
        if pieces:
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
        for index, row in enumerate(ticket.sample_rows):
            k = ticket.plan.rows[row].seq.params.logprobs
            if k is not None and ticket.plan.rows[row].samples:
                wanted.append(index)
                ticket.logprob_k = max(ticket.logprob_k, k)
        if not wanted:
            return []
        ticket.logprob_samples = wanted
        logits = logits[:, : self.vocab_size]
        ticket.logprob_k = min(ticket.logprob_k, self.vocab_size)
        if len(wanted) < logits.shape[0]:
            index_of = self.state.upload_index(wanted)
            logits, sampled = logits[index_of], sampled[index_of]
        return [pack_logprobs(logits, sampled.long(), ticket.logprob_k).flatten()]

    def _prompt_logprobs(
        self, ticket: RunnerTicket, inputs: StepInputs, hidden: Tensor
    ) -> list[Tensor]:
        """The same for prompt tokens start + 1 .. start + n of the rows that want them."""
        pieces: list[Tensor] = []
        first = 0  # of the row's tokens in the step
        for index, row in enumerate(ticket.plan.rows):
            k = row.seq.params.prompt_logprobs
            count = min(row.start + row.n, row.seq.num_prompt_tokens - 1) - row.start
            if k is not None and count > 0:
                k = min(k, self.vocab_size)
                targets = self.state.tokens[row.slot, row.start + 1 : row.start + 1 + count]
                packed = pack_prompt_logprobs(
                    hidden[first : first + count],
                    targets.long(),
                    k,
                    self.model.compute_logits,
                    self.vocab_size,
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
                values = self.model.compute_logits(values)[:, self.state.upload_index(list(ids))]
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


@contextmanager
def _stage(stage_s: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    stage_s[name] = time.perf_counter() - start


def _num_bytes(model: Model) -> int:
    if not isinstance(model, torch.nn.Module):
        return 0
    tensors = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.untyped_storage().nbytes() for t in tensors.values())
