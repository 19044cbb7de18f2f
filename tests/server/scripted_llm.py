"""`ScriptedLLM`: the interface of `nvcli.llm.LLM` over the real engine and a scripted device.

The answer to a prompt is written down as token ids, so everything the server makes of it is exact.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from nvcli.config import EngineConfig
from nvcli.described import Described
from nvcli.engine.engine import Engine, Request
from nvcli.engine.engine_thread import EngineThread
from nvcli.engine.grammar import Grammar, GrammarSpec
from nvcli.engine.step import StepPlan, StepResult
from nvcli.errors import EngineClosedError
from nvcli.text import Tokenizer
from nvcli.types import TokenLogprob
from tests.fakes import STARTUP
from tests.scripted_device import ScriptedDevice, ScriptedTicket
from tests.text.tiny_tokenizer import write_tokenizer

VOCABULARY = 300

Script = Callable[[tuple[int, ...]], Sequence[int]]


def make_tokenizer(folder: Path) -> Tokenizer:
    write_tokenizer(folder, vocab_size=VOCABULARY)
    return Tokenizer.from_folder(folder)


@dataclass
class ServedDevice(ScriptedDevice):
    """Gives alternatives with log-probabilities, those of the prompt too, and can be slowed or
    stopped."""

    delay_s: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def launch(self, plan: StepPlan) -> ScriptedTicket:
        self.gate.wait()
        if self.delay_s:
            time.sleep(self.delay_s)
        ticket = super().launch(plan)
        result: StepResult = ticket.result
        for index, row in enumerate(plan.rows):
            params = row.seq.params
            if index in result.logprobs:
                token_id = result.token_ids[index]
                result.logprobs[index] = _logprob(token_id, params.logprobs or 0)
            if params.prompt_logprobs is not None:
                targets = row.seq.prompt_token_ids[row.start + 1 : row.start + row.n + 1]
                result.prompt_logprobs[index] = [
                    _logprob(token_id, params.prompt_logprobs) for token_id in targets
                ]
            if row.seq.pools is not None and row.start + row.n == row.seq.num_prompt_tokens:
                count = len(row.seq.pools) or 64
                result.pooled[index] = struct.pack(f"<{count}f", *range(1, count + 1))
        self.plans.clear()
        return ticket


def _logprob(token_id: int, k: int) -> TokenLogprob:
    others = [(other, -1.0 - i) for i, other in enumerate(o for o in range(k) if o != token_id)]
    top = ((token_id, -0.25), *others)[:k]
    return TokenLogprob(token_id, -0.25, 1, top)


class ScriptedLLM(Described):
    """`script(prompt ids)` gives the ids of the answer; after them comes the end of the turn."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script,
        *,
        depth: int = 0,
        budget: int = 64,
        folder: Path | None = None,
        **device: Any,
    ) -> None:
        self.config = EngineConfig(model="scripted", max_num_seqs=device.get("max_num_seqs"))
        self.model_name = "scripted"
        self._tokenizer = tokenizer
        self.folder = folder
        self.model_config = SimpleNamespace(sampling_defaults={})
        self.startup = STARTUP
        self.prompts: list[tuple[int, ...]] = []
        self.requests: list[Request] = []
        eos = tokenizer.id_of("<|im_end|>")
        assert eos is not None
        self.eos_token_ids = frozenset({eos})

        def endless(prompt: tuple[int, ...]) -> Sequence[int]:
            return _Padded([*script(prompt)], eos)

        self.device = ServedDevice(endless, **device)
        self.engine = Engine(
            self.device,
            tokenizer,
            vocab_size=VOCABULARY,
            eos_token_ids=(eos,),
            max_num_batched_tokens=budget,
            depth=depth,
            seed=0,
        )
        self._thread = EngineThread(self.engine)
        self.vocab_size = VOCABULARY
        self.hidden_size = 64

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def max_num_seqs(self) -> int:
        return self.device.max_num_seqs

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    @property
    def error(self) -> EngineClosedError | None:
        return self._thread.error

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """It is checked, but an answer that is written down keeps to no grammar."""
        return cast(Grammar, super().compile_grammar(spec) and None)

    def submit(self, request: Request, sink: Any) -> None:
        self.requests.append(request)
        self.prompts.append(tuple(request.prompt_token_ids))
        self._thread.submit(request, sink)

    def abort(self, request_id: str) -> None:
        self._thread.abort(request_id)

    def stats(self) -> Any:
        return self.engine.stats()

    def close(self) -> None:
        self.device.gate.set()
        self._thread.close()

    def is_idle(self) -> bool:
        """Whether the engine holds nothing, as before the first request."""
        stats = self.stats()
        return (
            stats.num_running == stats.num_waiting == 0
            and stats.num_free_blocks == stats.num_blocks
        )


class _Padded(Sequence):  # type: ignore[type-arg]
    """A list that goes on with one value for ever."""

    def __init__(self, values: list[int], rest: int) -> None:
        self._values = values
        self._rest = rest

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: Any) -> Any:
        return self._values[index] if index < len(self._values) else self._rest
