"""Prometheus metrics: `nvcli:*`, the names vLLM uses for the same numbers, and HTTP."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvcli.server.state import ServerState
    from nvcli.types import RequestOutput, SamplingParams

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_COUNTS = tuple(float(2**i) for i in range(18))
_NAMES = ("nvcli:", "vllm:")

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", _FAST),
    "inter_token_latency_seconds": ("Time between tokens, mean of a request.", _FAST),
    "e2e_request_latency_seconds": ("Arrival to last token.", _FAST),
    "request_queue_time_seconds": ("Arrival to first step.", _FAST),
    "request_prefill_time_seconds": ("First step to first token.", _FAST),
    "request_decode_time_seconds": ("First token to last token.", _FAST),
    "request_inference_time_seconds": ("First step to last token.", _FAST),
    "request_prompt_tokens": ("Prompt tokens of a request.", _COUNTS),
    "request_generation_tokens": ("Output tokens of a sequence.", _COUNTS),
    "request_max_num_generation_tokens": ("Token limit that was asked for.", _COUNTS),
    "request_params_n": ("Outputs that were asked for.", (1, 2, 5, 10, 20, 50, 128)),
    "iteration_tokens_total": ("Sequences that got a token, by hand-over.", _COUNTS),
}


class Metrics:
    """Counters live here; gauges are read from the engine when somebody asks."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.registry = CollectorRegistry()
        self.registry.register(_EngineGauges(state))
        model = ("model_name",)
        self._histograms: dict[str, list[Histogram]] = {}
        for name, (text, buckets) in _HISTOGRAMS.items():
            self._histograms[name] = [
                Histogram(p + name, text, model, registry=self.registry, buckets=buckets)
                for p in _NAMES
            ]
        self._tokens: dict[str, list[Counter]] = {
            name: [Counter(p + name, text, model, registry=self.registry) for p in _NAMES]
            for name, text in (
                ("prompt_tokens", "Prompt tokens of finished requests."),
                ("generation_tokens", "Output tokens."),
            )
        }
        self._success = [
            Counter(
                p + "request_success",
                "Sequences that came to their end.",
                (*model, "finished_reason"),
                registry=self.registry,
            )
            for p in _NAMES
        ]
        self._http = Counter(
            "http_requests",
            "HTTP requests.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._http_time = Histogram(
            "http_request_duration_seconds",
            "Time to the end of the response.",
            ("handler", "method"),
            registry=self.registry,
            buckets=_FAST,
        )
        self._children: dict[tuple[Any, ...], Any] = {}

    def _of(self, metric: Any, *labels: str) -> Any:
        """`metric.labels(...)`, remembered: finding it takes longer than counting."""
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._of(self._http, handler, method, str(status)).inc()
        self._of(self._http_time, handler, method).observe(seconds)

    def observe_finished(self, output: RequestOutput, params: SamplingParams) -> None:
        """One sequence ended by itself."""
        name, times, usage = self._state.model, output.times, output.usage
        for counter in self._success:
            self._of(counter, name, str(output.finish_reason)).inc()
        self._count("generation_tokens", usage.completion_tokens)
        values: dict[str, float | None] = {"request_generation_tokens": usage.completion_tokens}
        if output.index == 0:
            self._count("prompt_tokens", usage.prompt_tokens)
            values["request_prompt_tokens"] = usage.prompt_tokens
            values["request_params_n"] = params.n
            values["request_max_num_generation_tokens"] = params.max_tokens
        if times is not None:
            first, token, last = times.first_scheduled, times.first_token, times.finished
            values["time_to_first_token_seconds"] = times.ttft_s
            values["e2e_request_latency_seconds"] = times.total_s
            values["request_queue_time_seconds"] = times.queue_s
            values["request_decode_time_seconds"] = times.decode_s
            if first is not None and token is not None:
                values["request_prefill_time_seconds"] = token - first
            if first is not None and last is not None:
                values["request_inference_time_seconds"] = last - first
            if times.decode_s is not None and usage.completion_tokens > 1:
                gap = times.decode_s / (usage.completion_tokens - 1)
                values["inter_token_latency_seconds"] = gap
        for key, value in values.items():
            if value is not None:
                self._observe(key, value)

    def observe_hand_over(self, num_outputs: int) -> None:
        self._observe("iteration_tokens_total", num_outputs)

    def _observe(self, name: str, value: float) -> None:
        model = self._state.model
        for histogram in self._histograms[name]:
            self._of(histogram, model).observe(value)

    def _count(self, name: str, amount: int) -> None:
        for counter in self._tokens[name]:
            self._of(counter, self._state.model).inc(amount)


class _EngineGauges(Collector):
    """The engine's own numbers at the moment of the scrape."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Any]:
        state = self._state
        if not state.is_loaded:
            return
        stats, bridge, model = state.llm.stats(), state.bridge, state.model
        used = stats.num_blocks - stats.num_free_blocks
        usage = used / stats.num_blocks if stats.num_blocks else 0.0
        gauges = (
            ("num_requests_running", "Sequences in the batch.", stats.num_running),
            ("num_requests_waiting", "Sequences in the queue.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.", usage),
        )
        counters = (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "num_queried_tokens"),
            ("prefix_cache_hits", "Of those, found.", "num_hit_tokens"),
            ("num_preemptions", "Sequences that gave up their blocks.", "num_preemptions"),
        )
        for prefix in _NAMES:
            for name, text, value in gauges:
                yield _gauge(prefix + name, text, model, value)
            for name, text, field in counters:
                yield _counter(prefix + name, text, model, getattr(stats, field))
            info = GaugeMetricFamily(
                prefix + "cache_config_info",
                "Size of the KV cache.",
                labels=("model_name", "block_size", "num_gpu_blocks"),
            )
            info.add_metric((model, str(stats.block_size), str(stats.num_blocks)), 1)
            yield info
        own = [
            ("kv_blocks_free", "Free KV blocks.", stats.num_free_blocks),
            ("kv_blocks", "KV blocks.", stats.num_blocks),
            ("open_sequences", "Sequences not ended yet.", bridge.num_open),
            ("http_requests_open", "Requests being answered.", state.num_requests),
        ]
        llm: Any = state.llm
        if hasattr(llm, "num_replicas"):  # of `nvcli.cluster`
            own += [
                ("replicas", "Engines that share the requests.", llm.num_replicas),
                ("replicas_up", "Of those, taking requests now.", llm.num_up),
                ("replicas_draining", "To be replaced, ending requests.", llm.num_draining),
            ]
        for name, text, value in own:
            yield _gauge(f"nvcli:{name}", text, model, value)
        aborted = bridge.num_aborted
        yield _counter("nvcli:requests_aborted", "Requests whose client left.", model, aborted)


def _family(kind: Any, name: str, text: str, model: str, value: float) -> Any:
    family = kind(name, text, labels=("model_name",))
    family.add_metric((model,), value)
    return family


_gauge = partial(_family, GaugeMetricFamily)
_counter = partial(_family, CounterMetricFamily)
