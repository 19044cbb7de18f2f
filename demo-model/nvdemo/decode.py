"""Batched greedy decoding with a KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nvdemo.model import Cache, Qwen3

_ROOM = {"cuda": 1 << 20, "cpu": 1 << 17}  # tokens of cache for one batch


@torch.inference_mode()
def greedy(model: Qwen3, prompts: list[list[int]], limit: int, stop: int) -> list[list[int]]:
    """At most ``limit`` tokens for each prompt, without the stop token that ended them."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    out: list[list[int]] = [[] for _ in prompts]
    room = _ROOM[model.model.embed_tokens.weight.device.type]
    while order:
        count = max(1, room // (len(prompts[order[0]]) + limit))
        part, order = order[:count], order[count:]
        answers = _batch(model, [prompts[i] for i in part], limit, stop)
        for i, answer in zip(part, answers, strict=True):
            out[i] = answer
    return out


def _batch(model: Qwen3, prompts: list[list[int]], limit: int, stop: int) -> list[list[int]]:
    config, weight = model.config, model.model.embed_tokens.weight
    device = weight.device
    count, longest = len(prompts), max(map(len, prompts))
    room = min(longest + limit, config.context)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.zeros(count, longest, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    cache: Cache = []
    for _ in range(config.layers):
        shape = (count, config.kv_heads, room, config.head_dim)
        cache.append(
            (
                torch.zeros(shape, dtype=weight.dtype, device=device),
                torch.zeros(shape, dtype=weight.dtype, device=device),
            )
        )
    place = torch.arange(room, device=device)
    prompt_places = place[:longest].expand(count, longest)
    mask = (place[:longest, None] >= place)[None, None]
    hidden = model(tokens, prompt_places, mask, cache, prompt_places)
    last = hidden[torch.arange(count, device=device), lengths - 1]
    step = model.logits(last).argmax(-1)
    written = [step]
    at = lengths.clone()
    done = step == stop
    while len(written) < limit and longest + len(written) < room:
        if len(written) % 8 == 0 and bool(done.all()):
            break
        mask = (place <= at[:, None])[:, None, None]
        hidden = model(step[:, None], at[:, None], mask, cache, at[:, None])
        step = model.logits(hidden[:, 0]).argmax(-1)
        done = done | (step == stop)
        written.append(step)
        at = at + 1
    rows: list[list[int]] = torch.stack(written, dim=1).tolist()
    return [row[: row.index(stop)] if stop in row else row for row in rows]


@torch.inference_mode()
def agreement(draft: Qwen3, prompts: list[list[int]], answers: list[list[int]]) -> tuple[int, int]:
    """How many tokens of the greedy answers the draft would have chosen, and how many there are."""
    device: torch.device = draft.model.embed_tokens.weight.device
    equal = total = 0
    pairs = [(p, a) for p, a in zip(prompts, answers, strict=True) if a]
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    for at in range(0, len(pairs), 64):
        part = pairs[at : at + 64]
        width = max(len(p) + len(a) for p, a in part)
        tokens = torch.zeros(len(part), width, dtype=torch.long)
        counted = torch.zeros(len(part), width, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(part):
            tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            counted[row, len(prompt) : len(prompt) + len(answer)] = True
        tokens, counted = tokens.to(device), counted.to(device)
        place = torch.arange(width, device=device)
        mask: Tensor = (place[:, None] >= place)[None, None]
        guess = draft.logits(draft(tokens, place.expand(len(part), width), mask)).argmax(-1)
        right = (guess[:, :-1] == tokens[:, 1:]) & counted[:, 1:]
        equal += int(right.sum())
        total += int(counted.sum())
    return equal, total
