"""A device whose output is written down: the k-th output token of a prompt is `script(prompt)[k]`.

It speaks the step protocol without a model, so that tests of everything above it are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nvcli.engine.step import StepPlan, StepResult
from nvcli.types import TokenLogprob

Script = Callable[[tuple[int, ...]], Sequence[int]]


@dataclass
class ScriptedTicket:
    plan: StepPlan
    result: StepResult


@dataclass
class ScriptedDevice:
    script: Script
    max_num_seqs: int = 8
    num_blocks: int = 256
    block_size: int = 4
    max_model_len: int = 512
    fail_when: Callable[[StepPlan], bool] = lambda _: False
    plans: list[StepPlan] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> ScriptedTicket:
        if self.fail_when(plan):
            raise RuntimeError("the scripted device was told to fail")
        self.plans.append(plan)
        token_ids, logprobs = [], {}
        for index, row in enumerate(plan.rows):
            position = row.start + row.n - row.seq.num_prompt_tokens
            outputs = self.script(tuple(row.seq.prompt_token_ids))
            token_id = outputs[position] if row.samples else -1
            token_ids.append(token_id)
            if row.samples and row.seq.params.logprobs is not None:
                logprobs[index] = TokenLogprob(token_id, -0.1 * (row.seq.index + 1), 1)
        return ScriptedTicket(plan, StepResult(token_ids, logprobs))

    def collect(self, ticket: ScriptedTicket) -> StepResult:
        return ticket.result
