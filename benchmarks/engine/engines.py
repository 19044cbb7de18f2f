"""One face for every engine: run a job as a batch, or stream it with times.

An engine is loaded with random weights from a folder that holds only config.json. Nothing is
detokenised anywhere, and each engine keeps its own defaults for everything that is not the job.
"""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.engine.workloads import Job


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Seconds, one number a prompt."""

    ttft: list[float]
    tpot: list[float]


class BenchEngine(Protocol):
    version: str
    options: dict[str, Any]

    def generate(self, job: Job) -> float: ...  # seconds for the whole batch

    def stream(self, job: Job) -> StreamTimes: ...

    def forget_prefixes(self) -> None: ...

    def report(self) -> dict[str, Any]: ...  # what it said at start

    def close(self) -> None: ...


class Nvcli:
    def __init__(self, folder: Path, max_model_len: int, options: dict[str, Any]) -> None:
        import nvcli
        from nvcli import LLM

        self.version = nvcli.__version__
        self.options = options
        self._llm = LLM(
            str(folder), load_format="dummy", max_model_len=max_model_len, seed=0, **options
        )

    def generate(self, job: Job) -> float:
        params = [self._params(job, n) for n in job.output_lens]
        start = time.perf_counter()
        outputs = self._llm.generate(job.prompts, params)
        elapsed = time.perf_counter() - start
        found = [len(output.token_ids) for output in outputs]
        assert found == job.output_lens, "not the tokens that were asked for"
        return elapsed

    def _params(self, job: Job, num_tokens: int) -> Any:
        from nvcli import SamplingParams

        return SamplingParams(
            temperature=job.temperature, max_tokens=num_tokens, ignore_eos=True, seed=None
        )

    def stream(self, job: Job) -> StreamTimes:
        import queue

        arrivals: queue.SimpleQueue[tuple[str, int, float]] = queue.SimpleQueue()

        def sink(outputs: list[Any]) -> None:
            now = time.perf_counter()
            for output in outputs:
                arrivals.put((output.request_id, len(output.token_ids), now))

        requests = [
            self._llm.request(prompt, self._params(job, n), raw=True)
            for prompt, n in zip(job.prompts, job.output_lens, strict=True)
        ]
        start = time.perf_counter()
        for request in requests:
            self._llm.submit(request, sink)
        seen: dict[str, _Arrivals] = {r.request_id: _Arrivals() for r in requests}
        num_left = job.num_output_tokens
        while num_left > 0:
            request_id, count, now = arrivals.get()
            seen[request_id].add(count, now)
            num_left -= count
        return _times(start, list(seen.values()))

    def forget_prefixes(self) -> None:
        pass  # the jobs that call for it never repeat token ids

    def report(self) -> dict[str, Any]:
        startup = self._llm.startup
        return {
            "weights_dtype": startup.weights_dtype,
            "kv_cache_dtype": startup.kv_cache_dtype,
            "deterministic": startup.deterministic,
            "attention": startup.attention_backend,
            "attention_reason": startup.attention_reason,
            "num_kernels": startup.num_kernels,
            "num_graphs": startup.num_graphs,
            "all_reduce": startup.all_reduce,
            "graph_bytes": startup.graph_bytes,
            "pool_bytes": startup.pool_bytes,
            "stage_s": {name: round(value, 2) for name, value in startup.stage_s.items()},
        }

    def close(self) -> None:
        self._llm.close()


class Vllm:
    def __init__(self, folder: Path, max_model_len: int, options: dict[str, Any]) -> None:
        for name, value in (
            ("VLLM_NO_USAGE_STATS", "1"),
            ("HF_HUB_OFFLINE", "1"),
            ("VLLM_USE_FLASHINFER_SAMPLER", "0"),
            ("VLLM_USE_DEEP_GEMM", "0"),
        ):
            os.environ.setdefault(name, value)
        import vllm
        from vllm import LLM

        self.version = vllm.__version__
        self.options = options
        self._llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            seed=0,
            max_model_len=max_model_len,
            generation_config="vllm",
            gpu_memory_utilization=0.9,
            **options,
        )
        self._num_requests = 0

    def _params(self, job: Job, kind: str) -> list[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return [
            SamplingParams(
                temperature=job.temperature,
                max_tokens=n,
                ignore_eos=True,
                detokenize=False,
                output_kind=getattr(RequestOutputKind, kind),
            )
            for n in job.output_lens
        ]

    def generate(self, job: Job) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        params = self._params(job, "FINAL_ONLY")
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        found = [len(output.outputs[0].token_ids) for output in outputs]
        assert found == job.output_lens, "not the tokens that were asked for"
        return elapsed

    def stream(self, job: Job) -> StreamTimes:
        engine = self._llm.llm_engine
        params = self._params(job, "DELTA")
        seen: dict[str, _Arrivals] = {}
        start = time.perf_counter()
        for prompt, prompt_params in zip(job.prompts, params, strict=True):
            self._num_requests += 1
            name = f"s{self._num_requests}"
            engine.add_request(name, {"prompt_token_ids": prompt}, prompt_params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                arrivals = seen.setdefault(output.request_id, _Arrivals())
                arrivals.add(len(output.outputs[0].token_ids), time.perf_counter())
        assert sum(a.count for a in seen.values()) == job.num_output_tokens
        return _times(start, list(seen.values()))

    def forget_prefixes(self) -> None:
        self._llm.reset_prefix_cache()

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass  # its process ends


@dataclass(slots=True)
class _Arrivals:
    """Of one stream's tokens."""

    first: float = 0.0
    last: float = 0.0
    count: int = 0

    def add(self, count: int, now: float) -> None:
        if count == 0:
            return
        if self.count == 0:
            self.first = now
        self.last = now
        self.count += count


def _times(start: float, streams: list[_Arrivals]) -> StreamTimes:
    return StreamTimes(
        ttft=[s.first - start for s in streams],
        tpot=[(s.last - s.first) / max(1, s.count - 1) for s in streams],
    )


ENGINES: dict[str, Callable[[Path, int, dict[str, Any]], BenchEngine]] = {
    "nvcli": Nvcli,
    "vllm": Vllm,
}


def is_installed(engine: str) -> bool:
    return importlib.util.find_spec(engine) is not None
