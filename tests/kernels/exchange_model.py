"""The exchange of `nvcli.kernels.all_reduce` as a model, and every order in which it can run.

A rank's exchange k puts words on their way, one for each peer and place, and is over when it has
read a word with the number k from each peer and place. Words arrive whole, at any time, in any
order; only two that go to the same place keep theirs. That is less than the hardware promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

Place = tuple[int, int, int, int]  # reader, slot, source, word


@dataclass(frozen=True)
class Rules:
    """Those of the kernel; a mutation changes one."""

    slots: int = 2
    numbers: int = 1 << 16  # that are told apart
    waits: bool = True  # for the number
    in_turn: bool = True  # an exchange sends when the one before it is over


class State(NamedTuple):
    sent: tuple[int, ...]  # exchanges, by rank
    done: tuple[int, ...]
    unread: tuple[frozenset[Place], ...]  # of the exchange after `done`, by rank
    memory: frozenset[tuple[Place, int]]  # the exchange whose word stands there; none: 0
    on_the_way: frozenset[tuple[Place, tuple[int, ...]]]  # oldest first


class Wrong(Exception):
    """A rank took a word of another exchange, or waits for ever."""


def explore(rules: Rules, ranks: int, words: int, exchanges: int) -> int:
    """Every order of so many exchanges; -> the number of states. Raises `Wrong`."""
    everyone = range(ranks)

    def places(reader: int, k: int) -> frozenset[Place]:
        sources = (source for source in everyone if source != reader)
        return frozenset((reader, k % rules.slots, *p) for p in product(sources, range(words)))

    def moves(state: State) -> Iterator[State]:
        for place, (first, *rest) in state.on_the_way:  # a word arrives
            others = dict(state.on_the_way)
            del others[place]
            yield state._replace(
                memory=frozenset({**dict(state.memory), place: first}.items()),
                on_the_way=frozenset((others | ({place: tuple(rest)} if rest else {})).items()),
            )
        memory, on_the_way = dict(state.memory), dict(state.on_the_way)
        for rank in everyone:
            sent, done = state.sent[rank], state.done[rank]
            if sent < exchanges and sent <= done + (not rules.in_turn):  # it sends all its words
                more = dict(on_the_way)
                for peer in everyone:
                    for place in places(peer, sent + 1):
                        if place[2] == rank:
                            more[place] = (*more.get(place, ()), sent + 1)
                yield state._replace(
                    sent=_with(state.sent, rank, sent + 1), on_the_way=frozenset(more.items())
                )
            if sent > done:  # it looks at a word
                for place in state.unread[rank]:
                    found = memory.get(place, 0)
                    if rules.waits and (found - done - 1) % rules.numbers:
                        continue
                    if found != done + 1:
                        raise Wrong(f"rank {rank} took {found} in exchange {done + 1}")
                    unread = state.unread[rank] - {place}
                    yield state._replace(
                        done=state.done if unread else _with(state.done, rank, done + 1),
                        unread=_with(state.unread, rank, unread or places(rank, done + 2)),
                    )

    unread = tuple(places(rank, 1) for rank in everyone)
    start = State((0,) * ranks, (0,) * ranks, unread, frozenset(), frozenset())
    seen, rest = {start}, [start]
    while rest:
        state = rest.pop()
        following = list(moves(state))
        if not following and min(state.done) < exchanges:
            raise Wrong(f"all wait: {state.done} of {exchanges} exchanges are over")
        new = set(following) - seen
        seen |= new
        rest += new
    return len(seen)


def _with(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])


MUTATIONS = {
    "one slot": replace(Rules(), slots=1),
    "words are not waited for": replace(Rules(), waits=False),
    "numbers modulo 2": replace(Rules(), numbers=2),
    "sending before the last exchange is over": replace(Rules(), in_turn=False),
}
