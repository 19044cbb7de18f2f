"""The sampler: from logits to one token per row, each row by its own parameters and seed.

Hot path: yes.

Rows that need the same work form a group; within a group every row runs the same operations over
the same widths, which depend on that row's parameters alone. So a row's token does not depend on
what else is in the batch. Groups are kept as long as the same slots sample step after step.

Order: repetition, frequency and presence penalty, bias with allowed and bad tokens, bad words,
min_tokens, grammar; then greedy (argmax, lowest id on a tie), or temperature, a draw from the
softmax by the noise of (seed, position, token id), and what top_k, top_p and min_p say to it: where
they have dropped the token, one more draw from what they left (`kernels.noise`).

Logits are only read; a group that changes them works on its own copy. Ids from `vocab_size` up
(padding of the head) are cut off first and can never be sampled. Where the masks of a row forbid
every token, or its logits are no numbers, -1 comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nvcli.engine.device_state import F, I
from nvcli.kernels.noise import AGAIN, GROUP, GROUPS, gumbel_noise, noise_keys

if TYPE_CHECKING:
    from nvcli.engine.device_state import DeviceState, SlotInfo, StepInputs
    from nvcli.engine.staging import Array

CHUNK = 64  # ids whose maximum is looked at as one when the best are searched
MAX_TOP_K_WIDTH = 1024  # above it a sort is no slower
NUCLEUS_WIDTHS = (256, 4096)  # candidates tried first where only top_p limits them
# of one [rows, V] intermediate: bounded memory on CUDA, on the CPU what stays in its caches
MAX_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 17}
_LOW_BITS = (1 << 32) - 1

# Kinds of width without few candidates.
WHOLE = 0  # no top_k, no top_p: nothing is ordered
NUCLEUS = -1  # top_p alone
SORTED = -2  # a top_k beyond MAX_TOP_K_WIDTH


class GroupKey(NamedTuple):
    """What the rows of a group have in common."""

    is_greedy: bool
    width: int  # candidates for top_k, a power of two; or one of the kinds above
    has_min_p: bool
    has_penalties: bool
    has_bias: bool
    has_masked_ids: bool
    has_bad_words: bool
    has_grammar: bool

    @property
    def changes_logits(self) -> bool:
        return self.has_penalties or self.has_masks

    @property
    def has_masks(self) -> bool:
        """Whether a row may have nothing left to sample."""
        return self.has_bias or self.has_masked_ids or self.has_bad_words or self.has_grammar

    @property
    def needs_whole_rows(self) -> bool:
        """Whether it makes float rows as wide as the vocabulary."""
        return self.changes_logits or not self.is_greedy


def group_key(info: SlotInfo, vocab_size: int) -> GroupKey:
    params, features = info.params, info.features
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    if params.is_greedy:
        width = WHOLE
    elif top_k:
        width = max(16, 1 << (top_k - 1).bit_length())
        if width > MAX_TOP_K_WIDTH or width >= vocab_size:
            width = SORTED
    else:
        width = NUCLEUS if params.top_p < 1 else WHOLE
    return GroupKey(
        is_greedy=params.is_greedy,
        width=width,
        has_min_p=params.min_p > 0 and not params.is_greedy,
        has_penalties=features.has_penalties,
        has_bias=features.has_bias,
        has_masked_ids=bool(features.masked_ids),
        has_bad_words=bool(features.bad_words),
        has_grammar=features.has_grammar,
    )


@dataclass(slots=True)
class Group:
    """Rows of one key, with their parameters gathered: r rows."""

    key: GroupKey
    rows: Tensor | None  # [r] int64 into the R sampling rows; None: all of them, in order
    host_rows: list[int]  # the same on the host
    infos: list[SlotInfo]
    slots: Tensor  # [r] int64
    params_f: Tensor  # [r, 8] float32
    top_p: Tensor  # [r] float64: 0.8 of ten equal tokens are eight, not nine
    params_i: Tensor  # [r, 8]
    masked_rows: Tensor | None  # [m] int64 into the group, with masked_ids
    masked_ids: Tensor | None  # [m] int64


# --- the best tokens, without a sort -------------------------------------------------------------


def _sort_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys that order by value, and by falling id among equal values.

    values: [r, K] float32; ids: [K] or [r, K] int64.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: both zeros become one
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, in the order of the floats
    return (ordered.long() << 32) | (_LOW_BITS - ids)


def top_candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row, best first, the lower id first on a tie.

    logits: [r, v] any float type -> values [r, k] float32, ids [r, k] int64.

    The k best lie in the k chunks of 64 ids with the greatest maxima (ties: the earlier chunk), so
    one pass over the row finds the chunks and only k * 64 candidates are ordered.
    """
    num_rows, v = logits.shape
    num_chunks = v // CHUNK
    all_ids = torch.arange(v, device=logits.device)
    if k * 2 >= num_chunks:
        keys = _sort_keys(logits.float(), all_ids)
    else:
        whole = logits[:, : num_chunks * CHUNK].view(num_rows, num_chunks, CHUNK)
        maxima = _sort_keys(whole.amax(2).float(), all_ids[:num_chunks])  # [r, num_chunks]
        chunks = _LOW_BITS - (maxima.topk(k, 1, sorted=False).values & _LOW_BITS)  # [r, k]
        ids = (chunks[:, :, None] * CHUNK + all_ids[:CHUNK]).flatten(1)  # [r, k * 64]
        tail = all_ids[num_chunks * CHUNK :].expand(num_rows, -1)  # the chunk that is not full
        ids = torch.cat((ids, tail), 1)
        keys = _sort_keys(logits.gather(1, ids).float(), ids)
    best = _LOW_BITS - (keys.topk(k, 1).values & _LOW_BITS)  # [r, k]
    return logits.gather(1, best).float(), best


# --- draws and filters ---------------------------------------------------------------------------


def draw(y: Tensor, keys: Tensor) -> Tensor:
    """Ids drawn from softmax(y): a group of GROUP ids, then the id in it, as `kernels.noise` says.

    y: [r, v] float32, at most 0 as `scale` makes it; keys: [r] int64 -> [r] int64. A group whose
    exp(y) are all 0 is 87 below the best at least, and the noise is from -3 to 23.
    """
    in_groups = torch.nn.functional.pad(y, (0, -y.shape[1] % GROUP), value=-torch.inf)
    in_groups = in_groups.reshape(y.shape[0], -1, GROUP)  # [r, G, GROUP]
    groups = torch.arange(in_groups.shape[1], device=y.device)
    scores = in_groups.exp().sum(2).log_().add_(gumbel_noise(keys, GROUPS + groups))  # [r, G]
    group = scores.argmax(1, keepdim=True)  # [r, 1]
    ids = group * GROUP + torch.arange(GROUP, device=y.device)  # [r, GROUP]
    inside = in_groups.gather(1, group[:, :, None].expand(-1, -1, GROUP))[:, 0]
    best = (inside + gumbel_noise(keys, ids)).argmax(1, keepdim=True)
    return ids.gather(1, best)[:, 0]


def draw_from_left(drawn: Tensor, y: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """What was drawn from all where the filters left it, and elsewhere a second draw.

    drawn, keys: [r] int64; y: [r, K] float32, -inf where dropped; ids: [r, K] int64 -> [r] int64.
    """
    is_left = ((ids == drawn[:, None]) & (y > -torch.inf)).any(1)  # [r]
    best = (y + gumbel_noise(keys, AGAIN + ids)).argmax(1, keepdim=True)
    return torch.where(is_left, drawn, ids.gather(1, best)[:, 0])


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - max) / temperature: at most 0, so that no temperature can overflow.

    logits: [r, K] float32; temperature: [r] -> [r, K] float32.
    """
    best = logits.amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    return (logits - best).div_(temperature[:, None])


def filter_sorted(
    y: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, total: Tensor | None = None
) -> Tensor:
    """Set to -inf, in place, what top_k, top_p and min_p drop, in this order.

    y: [r, K] scaled logits, best first; top_k, top_p, min_p: [r]; total: [r], the mass sum(exp(y))
    that top_p is a share of, by default what top_k left of y. The token that crosses top_p stays:
    one is dropped when those before it already have the mass.
    """
    rank = torch.arange(y.shape[1], device=y.device)
    limit = torch.where(top_k > 0, top_k, y.shape[1])
    y.masked_fill_(rank >= limit[:, None], -torch.inf)
    mass = y.double().exp_().cumsum(1)  # [r, K]
    enough = top_p * (mass[:, -1] if total is None else total)
    enough = enough.masked_fill(top_p >= 1, torch.inf)
    y[:, 1:].masked_fill_(mass[:, :-1] >= enough[:, None], -torch.inf)
    return y.masked_fill_(y < min_p.log()[:, None], -torch.inf)


class Sampler:
    """Samples a step's rows. Every method enqueues and none waits for the device."""

    def __init__(self, state: DeviceState, vocab_size: int, *, deterministic: bool = False) -> None:
        """deterministic: each row by itself, as other numbers of rows may sum in other orders."""
        self.state = state
        self.deterministic = deterministic
        self.vocab_size = vocab_size  # ids the tokenizer knows; the logits may be wider
        self._groups: list[Group] = []
        self._masks: list[Array | None] | None = None  # of this step
        self._groups_of: tuple[int, list[int]] = (-1, [])
        self._all_ids = torch.arange(vocab_size, device=state.device)  # [v]

    def sample(self, logits: Tensor, slots: list[int], inputs: StepInputs) -> Tensor:
        """logits: [R, V]; slots: of the R sampling rows -> token ids [R] int64, -1 where a
        row's masks forbid every token, or its logits are no numbers."""
        logits = logits[:, : self.vocab_size]
        if self._groups_of != (self.state.version, slots):
            self._groups = self._make_groups(slots, inputs.sample_slots)
            self._groups_of = (self.state.version, slots)
        self._masks = inputs.masks
        positions = inputs.sample_positions
        if len(self._groups) == 1:
            return self._sample_group(self._groups[0], logits, positions)
        sampled = torch.empty_like(positions)
        for group in self._groups:
            assert group.rows is not None, "several groups, so none has all rows"
            sampled[group.rows] = self._sample_group(
                group, logits[group.rows], positions[group.rows]
            )
        return sampled

    def _make_groups(self, slots: list[int], device_slots: Tensor) -> list[Group]:
        members: dict[GroupKey, list[int]] = {}
        infos: list[SlotInfo] = []
        for row, slot in enumerate(slots):
            info = self.state.slots[slot]
            assert info is not None, f"slot {slot} has no owner"
            infos.append(info)
            members.setdefault(group_key(info, self.vocab_size), []).append(row)
        groups = []
        max_rows = max(1, MAX_ELEMENTS[self.state.device.type] // self.vocab_size)
        parts: list[tuple[GroupKey, list[int]]] = []
        for key, rows in members.items():
            size = max_rows if key.needs_whole_rows else len(rows)
            size = 1 if self.deterministic else size
            parts += [(key, rows[i : i + size]) for i in range(0, len(rows), size)]
        for key, rows in parts:
            index = None if len(parts) == 1 else self.state.staging.upload_index(rows)
            # a copy: the step's own array is gone when the group is used again
            of_group = device_slots.clone() if index is None else device_slots[index]
            masked = [(i, t) for i, row in enumerate(rows) for t in infos[row].features.masked_ids]
            upload = self.state.staging.upload_index
            groups.append(
                Group(
                    key=key,
                    rows=index,
                    host_rows=rows,
                    infos=[infos[row] for row in rows],
                    slots=of_group,
                    params_f=self.state.params_f[of_group].float(),
                    top_p=self.state.params_f[of_group, F.TOP_P],
                    params_i=self.state.params_i[of_group],
                    masked_rows=upload([i for i, _ in masked]) if masked else None,
                    masked_ids=upload([t for _, t in masked]) if masked else None,
                )
            )
        return groups

    def _sample_group(self, group: Group, logits: Tensor, positions: Tensor) -> Tensor:
        """logits: [r, v], read only; positions: [r] int64 -> [r] int64."""
        key = group.key
        if key.changes_logits:
            logits = self._change_logits(group, logits, positions)
        if key.is_greedy:
            sampled = logits.argmax(1)
        else:
            seeds = noise_keys(group.params_i[:, I.SEED], positions)  # [r]
            sampled = self._draw(group, logits, seeds)
        # A forbidden token wins only where all are forbidden, and one that is no number where none
        # is one: both are no more than -inf.
        is_possible = logits.gather(1, sampled[:, None])[:, 0] > -torch.inf
        return sampled.masked_fill_(~is_possible, -1)

    def _draw(self, group: Group, logits: Tensor, seeds: Tensor) -> Tensor:
        """Temperature, the draw and filters.  logits: [r, v] -> [r] int64."""
        key, params_f, top_p = group.key, group.params_f, group.top_p
        temperature, min_p = params_f[:, F.TEMPERATURE], params_f[:, F.MIN_P]
        top_k = group.params_i[:, I.TOP_K]
        y = scale(logits.float(), temperature)  # [r, v]
        drawn = draw(y, seeds)
        if key.width > WHOLE:
            values, ids = top_candidates(logits, key.width)
            y = filter_sorted(scale(values, temperature), top_k, top_p, min_p)
        elif key.width == NUCLEUS:
            y, ids = self._filter_nucleus(y, top_k, top_p, min_p)
        elif key.width == SORTED:
            y, ids = y.sort(dim=1, descending=True, stable=True)
            y = filter_sorted(y, top_k, top_p, min_p)
        elif key.has_min_p:
            y, ids = (
                y.masked_fill_(y < min_p.log()[:, None], -torch.inf),
                self._all_ids.expand_as(y),
            )
        else:
            return drawn
        return draw_from_left(drawn, y, ids, seeds)

    def _filter_nucleus(
        self, y: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> tuple[Tensor, Tensor]:
        """top_p over the whole vocabulary.  y: [r, v] -> y and ids [r, K], best first.

        The CPU looks first whether a few candidates have the mass; CUDA would have to wait to see
        it, so it sorts. The masses are the same numbers either way.
        """
        total = y.exp().sum(1).double()  # [r]
        for width in NUCLEUS_WIDTHS if y.device.type == "cpu" else ():
            if width < self.vocab_size:
                values, ids = top_candidates(y, width)
                if (values.double().exp_().cumsum(1)[:, -1] >= top_p * total).all():
                    return filter_sorted(values, top_k, top_p, min_p, total), ids
        values, ids = y.sort(dim=1, descending=True, stable=True)
        return filter_sorted(values, top_k, top_p, min_p, total), ids

    def _change_logits(self, group: Group, logits: Tensor, positions: Tensor) -> Tensor:
        """A float32 copy with penalties, bias and masks applied.  -> [r, v] float32."""
        state, v = self.state, self.vocab_size
        x = logits.to(torch.float32, copy=True)
        if group.key.has_penalties:
            assert state.by_token.counts is not None
            assert state.by_token.prompt_seen is not None
            counts = state.by_token.counts[group.slots, :v]  # [r, v]
            is_output = counts > 0
            repetition = group.params_f[:, F.REPETITION, None]
            repeated = torch.where(x > 0, x / repetition, x * repetition)
            x = torch.where(state.by_token.prompt_seen[group.slots, :v] | is_output, repeated, x)
            x -= counts * group.params_f[:, F.FREQUENCY, None]
            x -= is_output * group.params_f[:, F.PRESENCE, None]
        if group.key.has_bias:
            assert state.by_token.logit_bias is not None
            x += state.by_token.logit_bias[group.slots, :v]
        if group.key.has_bad_words:
            self._mask_bad_words(group, x, positions)
        if group.masked_rows is not None and group.masked_ids is not None:
            num_outputs = positions - group.params_i[:, I.PROMPT_LEN]  # [r]
            is_early = (num_outputs < group.params_i[:, I.MIN_TOKENS])[group.masked_rows]
            mask = torch.where(is_early, -torch.inf, 0.0)
            x.index_put_((group.masked_rows, group.masked_ids), mask, accumulate=True)
        if group.key.has_grammar and self._masks is not None:
            masks = [self._masks[row] for row in group.host_rows]
            x.masked_fill_(~state.staging.upload_masks(masks, v), -torch.inf)
        return x

    def _mask_bad_words(self, group: Group, x: Tensor, positions: Tensor) -> None:
        """Mask the last token of every bad word whose other tokens stand before it."""
        for i, info in enumerate(group.infos):
            assert info.bad_words is not None
            prefixes, last = info.bad_words  # [W, L], [W]
            width = prefixes.shape[1]
            index = positions[i] + torch.arange(-width, 0, device=x.device)  # [L]
            before = self.state.tokens[group.slots[i]].gather(0, index.clamp(min=0))
            before = torch.where(index < 0, -2, before)
            is_hit = ((prefixes == before) | (prefixes == -1)).all(1)  # [W]
            x[i].index_add_(0, last, torch.where(is_hit, -torch.inf, 0.0))
