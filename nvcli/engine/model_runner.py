"""The model runner: loads a model, settles what fits beside it, and then runs its steps.

In order: weights, attention backend, the size of the KV cache (on CUDA from what the largest steps
took), the tables of `DeviceState`, CUDA graphs. The steps themselves are `step_runner`.
"""

from __future__ import annotations

import gc
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from nvcli import kernels
from nvcli.config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from nvcli.engine.device_choice import (
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    weights_dtype,
)
from nvcli.engine.device_state import DeviceState
from nvcli.engine.kv_cache import (
    DEFAULT_SHARE,
    KVCache,
    KVCacheSpec,
    available_memory,
    format_bytes,
    fp8_scales,
    size_pool,
)
from nvcli.engine.sampler import Sampler
from nvcli.engine.sequence import Sequence
from nvcli.engine.startup import StartupReport, stage
from nvcli.engine.step import Row, SlotInit, StepPlan
from nvcli.engine.step_runner import StepRunner
from nvcli.engine.token_by_token import TokenByToken
from nvcli.errors import EngineError, OutOfMemoryError, UsageError
from nvcli.layers.linear import Linear
from nvcli.parallel import SOLO, TPGroup
from nvcli.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from nvcli.config import EngineConfig
    from nvcli.engine.cuda_graph import GraphRunner
    from nvcli.engine.shared_steps import SharedSteps
    from nvcli.engine.step_runner import Model
    from nvcli.kernels.attention import AttentionBackend
    from nvcli.models.config import ModelConfig


class ModelRunner(StepRunner):
    """One device with a loaded model and its KV cache: a `StepDevice`.

    Made from a checkpoint and an `EngineConfig`, it knows the numbers that were left open there
    (`max_model_len`, `num_blocks`, `max_num_seqs`, `depth`) and reports the start in `startup`.
    `launch` and `collect` (from `StepRunner`) run steps. One thread at a time may call it.
    """

    def __init__(
        self,
        folder: Path | None,
        model_config: ModelConfig,
        config: EngineConfig,
        *,
        vocab_size: int | None = None,
        model: Model | None = None,
        attention: AttentionBackend | None = None,
        group: TPGroup = SOLO,
    ) -> None:
        """Load the model and reserve the KV cache.

        Args:
            folder: the checkpoint; not read when `model` is given.
            vocab_size: ids the tokenizer knows; the model's may be padded beyond it.
            model, attention: used instead of the checkpoint's and the fastest.
            group: the ranks that hold the model together; each of them makes a runner with the
                same arguments at the same time, in a process of its own.

        Raises:
            UsageError: `max_model_len` is beyond the model.
            DeviceError: there is no such device.
            WeightsError: the checkpoint cannot be read.
            OutOfMemoryError: the weights or the smallest useful KV cache do not fit.
        """
        self._is_closed = False
        self.config = config
        self.model_config = model_config
        self.group = group
        self.reports = group.rank == 0
        self.device = resolve_device(config.device)
        kind = self.device.type
        self.dtype = resolve_dtype(config.dtype, self.device, model_config.dtype)
        self.vocab_size = min(vocab_size or model_config.vocab_size, model_config.vocab_size)
        self._logits_width = group.padded(model_config.vocab_size)
        self.max_num_seqs = config.max_num_seqs or MAX_NUM_SEQS[kind]
        self.max_num_batched_tokens = config.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[kind]
        is_ahead = kind == "cuda" if config.run_ahead is None else config.run_ahead
        self.depth = 1 if is_ahead else 0
        self.block_size = config.block_size
        self.max_model_len = model_config.model_len(config.max_model_len)
        self._spec = KVCacheSpec(
            num_layers=model_config.num_layers,
            num_kv_heads=max(1, model_config.num_kv_heads // group.size),
            head_dim=model_config.head_dim,
            block_size=config.block_size,
            dtype=resolve_kv_dtype(config.kv_cache_dtype, self.dtype),
        )
        stage_s: dict[str, float] = {}
        all_reduce = ""
        if group.size > 1:
            from nvcli.engine.peers import connect

            with stage(stage_s, "all-reduce"):
                hidden, fuses_norm = model_config.hidden_size, not config.deterministic
                all_reduce = connect(group, hidden, self.dtype, self.device, fuses_norm=fuses_norm)
        memory_before = self._free_memory()
        with stage(stage_s, "weights"):
            self.model = model if model is not None else self._load_model(folder)
        self._weights_bytes = _num_bytes(self.model)
        if config.deterministic:
            self._make_deterministic()
        self._kv_scales: Tensor | None = None  # [L, 2, Hk]
        if self._spec.dtype == torch.float8_e4m3fn:
            with torch.inference_mode():
                self._kv_scales = fp8_scales(self.model.kv_limits())
        with stage(stage_s, "attention"):
            self.attention, reason = (
                (attention, "given") if attention is not None else self._select_attention()
            )
        num_kernels = 0
        if kind == "cuda":
            with stage(stage_s, "kernels"):
                num_kernels = self._compile_kernels()
        with stage(stage_s, "profile"):
            num_blocks = self._settle_num_blocks(memory_before)
            limits = [num_blocks, self.max_model_len]
            self.num_blocks, self.max_model_len = group.least(limits, self.device)
        with stage(stage_s, "kv_cache"):
            self._allocate(self.num_blocks)
        with stage(stage_s, "graphs"):
            graph_bytes = self._capture_graphs()
        self.startup = StartupReport(
            device=torch.cuda.get_device_name(self.device) if kind == "cuda" else "cpu",
            dtype=str(self.dtype).removeprefix("torch."),
            weights_dtype=weights_dtype(self.dtype, self.device, is_fp8=model_config.is_fp8),
            kv_cache_dtype=str(self._spec.dtype).removeprefix("torch."),
            attention_backend=getattr(self.attention, "name", type(self.attention).__name__),
            attention_reason=reason,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            pool_bytes=self.kv_cache.nbytes,
            weights_bytes=self._weights_bytes,
            tensor_parallel_size=group.size,
            all_reduce=all_reduce,
            deterministic=config.deterministic,
            num_kernels=num_kernels,
            num_graphs=self.graphs.num_graphs if self.graphs is not None else 0,
            buckets=self.graphs.buckets if self.graphs is not None else None,
            graph_bytes=graph_bytes,
            stage_s=stage_s,
        )

    # --- loading ---------------------------------------------------------------------------------

    def _load_model(self, folder: Path | None) -> Model:
        from nvcli.models import load_model

        assert folder is not None, "a folder, or a model"
        width = 1 if self.model_config.is_fp8 else self.dtype.itemsize
        size = self.model_config.least_params * width // self.group.size
        with _refused_weights(size, self.device):
            model = load_model(
                folder,
                self.model_config,
                device=self.device,
                dtype=self.dtype,
                load_format=self.config.load_format,
                group=self.group,
            )
        if self.device.type == "cuda" and kernels.uses_triton() and not self.config.deterministic:
            with torch.inference_mode():
                model.fold_norms()
        return model

    def _make_deterministic(self) -> None:
        if self.device.type == "cpu":
            self.model = TokenByToken(self.model)
            return
        if self.group.size > 2:
            raise UsageError(
                "--deterministic takes at most 2 GPUs: the order in which more are summed up "
                "depends on the size of the step",
                param="deterministic",
            )
        assert isinstance(self.model, torch.nn.Module), "a model of layers"
        for module in self.model.modules():
            if isinstance(module, Linear):
                module.deterministic = True

    def _select_attention(self) -> tuple[AttentionBackend, str]:
        from nvcli.kernels.attention import select_backend

        return select_backend(
            self.config.attention_backend,
            device=self.device,
            dtype=self._spec.dtype,
            head_dim=self._spec.head_dim,
            block_size=self.block_size,
            deterministic=self.config.deterministic,
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
        """Bytes for the KV cache: `memory_utilization` less what everything else takes."""
        share = self.config.memory_utilization or DEFAULT_SHARE[self.device.type]
        if self.device.type == "cpu":  # whose memory all ranks share
            return int(share * memory_before / self.group.size) - self._weights_bytes
        peak = self._profile()
        free, total = torch.cuda.mem_get_info(self.device)
        # The tables of penalties and biases (`TokenTables`, 9 bytes an entry) are not in the peak:
        # they are made later, or once more while those of the profile are still there.
        tables = (self.max_num_seqs + 1) * self._logits_width * 9
        return int(share * total) - (total - free) - peak - tables

    def _compile_kernels(self) -> int:
        """Compile the kernels of captured steps, several at once; -> how many. Others are compiled
        when they are first used.
        """
        self._allocate(0)
        graphs = self._make_graphs()
        if graphs is None:
            return 0
        from nvcli.kernels.compiling import compiled_only

        with (
            _refused_graphs(self.max_num_seqs),
            torch.inference_mode(),
            compiled_only(self.device) as found,
        ):
            graphs.run_each_kind()
        return len(found)

    def _profile(self) -> int:
        """Run the largest steps once; -> the bytes they took beside the weights."""
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
                hint="Lower --max-num-seqs or --max-model-len, or use a smaller model.",
            ) from error
        peak = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        return peak + self._graph_bytes_bound()

    def _graph_bytes_bound(self) -> int:
        """An upper bound on what all CUDA graphs take: the largest of each kind are captured,
        measured and dropped.
        """
        graphs = self._make_graphs()
        if graphs is None:
            return 0
        from nvcli.engine.cuda_graph import Capture

        before = self._free_memory()
        with _refused_graphs(self.max_num_seqs), torch.inference_mode():
            graphs.capture(Capture(self.device), limit=1)
        bound = graphs.bytes_beyond(before - self._free_memory()) + graphs.buffer_bytes
        del graphs
        gc.collect()
        torch.cuda.empty_cache()
        return bound

    def _make_graphs(self) -> GraphRunner | None:
        if self._step_sampler is None or self.config.enforce_eager:
            return None
        if getattr(self.attention, "name", "") != "triton":
            return None  # the others plan each step on the host, which a replay would skip
        from nvcli.engine.cuda_graph import GraphRunner

        with _refused_graphs(self.max_num_seqs):
            return GraphRunner(
                self.model,
                self.state,
                self._step_sampler,
                self.attention,
                max_num_batched_tokens=self.max_num_batched_tokens,
                dtype=self.dtype,
                shared=self._make_shared_steps(),
            )

    def _make_shared_steps(self) -> SharedSteps | None:
        """What steps whose rows share blocks need; None where none do, or where reading shared
        blocks once is switched off.
        """
        from nvcli.engine.shared_steps import SharedSteps
        from nvcli.kernels.triton_attention import TritonAttention

        if not isinstance(self.attention, TritonAttention):
            return None
        if not self.config.enable_prefix_caching:
            return None
        num_heads = self.model_config.num_heads // self.group.size
        prefixes = self.attention.shared_prefixes(
            num_heads, self._spec.num_kv_heads, self.block_size, self.device
        )
        if prefixes is None:
            return None
        return SharedSteps(prefixes, self.max_num_seqs, self.device)

    def _capture_graphs(self) -> int:
        """-> the bytes they take."""
        self.graphs = self._make_graphs()
        if self.graphs is None:
            return 0
        from nvcli.engine.cuda_graph import Capture

        before = self._free_memory()
        with _refused_graphs(self.max_num_seqs), torch.inference_mode():
            self.graphs.capture(Capture(self.device))
        torch.cuda.synchronize(self.device)
        return before - self._free_memory() + self.graphs.buffer_bytes

    def _profile_plans(self) -> Iterator[StepPlan]:
        """The steps that take most memory: all slots decoding, then a full token budget of prompts
        whose hidden states are all kept. They read the dummy block only.
        """
        budget = self.max_num_batched_tokens
        longest = max(1, min(budget, self.max_model_len - 1))
        params = SamplingParams(temperature=1.0, top_p=0.9)
        for num_rows, n in (
            (min(self.max_num_seqs, budget), 1),
            (min(self.max_num_seqs, -(-budget // longest)), longest),
        ):
            blocks = [self.kv_cache.dummy_block] * self._spec.blocks_for(n)
            plan, prompt = StepPlan(step_id=-1), array("i", [0]) * n
            for slot in range(num_rows):
                seq = Sequence(-1, prompt, params, 1, 0, block_table=blocks)
                seq.pools = () if n > 1 else None
                plan.slot_inits.append(SlotInit(slot, prompt, [], params, 0, frozenset()))
                plan.rows.append(Row(seq, 0, slot, 0, n, samples=True, is_stored=True))
            yield plan

    def _allocate(self, num_blocks: int) -> None:
        self.kv_cache = KVCache(self._spec, num_blocks, self.device, self._kv_scales)
        self.state = DeviceState(
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            padded_vocab_size=self._logits_width,
            kv_cache=self.kv_cache,
            device=self.device,
        )
        self.sampler = Sampler(self.state, self.vocab_size, deterministic=self.config.deterministic)
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


@contextmanager
def _refused_weights(size: int, device: torch.device) -> Iterator[None]:
    """size: bytes that they need at least. What main memory cannot hold is not tried, as the system
    may kill us only later."""
    message = f"the weights need {format_bytes(size)} or more"
    hint = "Take a smaller model, or more memory."
    if device.type == "cpu" and size > (free := available_memory()):
        raise OutOfMemoryError(f"{message}, and {format_bytes(free)} are available", hint=hint)
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # of the CPU it is no class of its own
        words = ("allocate memory", "not enough memory", "size calculation overflowed")
        is_refusal = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_refusal and not any(word in str(error) for word in words):
            raise
        raise OutOfMemoryError(f"{message}, and the device refused it", hint=hint) from error


@contextmanager
def _refused_graphs(max_num_seqs: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the CUDA graphs of up to {max_num_seqs} sequences do not fit beside the weights",
            hint="Lower --max-num-seqs or --gpu-memory-utilization.",
        ) from error


def _num_bytes(model: Model) -> int:
    if not isinstance(model, torch.nn.Module):
        return 0
    tensors = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.untyped_storage().nbytes() for t in tensors.values())
