"""Which request goes where, and what the sums are: actors that only write down their calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.cluster.dispatcher import Dispatcher
from nvcli.cluster.routing import (
    GROWTH,
    MAX_PREFIXES,
    PREFIX_TOKENS,
    Call,
    Router,
    Slot,
    prefix_keys,
)
from nvcli.errors import EngineClosedError
from nvcli.server.wire import pack_output
from nvcli.types import FinishReason, RequestOutput
from tests.waiting import PATIENCE_S

BLOCK_SIZE = 16


@dataclass
class Method:
    calls: list[tuple[Any, ...]]
    name: str

    def remote(self, *args: Any) -> None:
        self.calls.append((self.name, *args))


@dataclass
class Actor:
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Method:
        return Method(self.calls, name)


def call(name: str, prefix: int = -1, *, is_streaming: bool = False, n: int = 1) -> Call:
    prefixes = (prefix,) if prefix >= 0 else ()
    return Call(name, b"", lambda outputs: None, set(range(n)), prefixes, is_streaming)


def make(count: int = 2, slack: int = 2) -> tuple[Dispatcher, list[Slot]]:
    slots = [Slot(i, Actor()) for i in range(count)]
    dispatcher = Dispatcher(slots, Router(slack))
    for slot in slots:
        assert dispatcher.bring_up(slot)
    return dispatcher, slots


def names(slot: Slot) -> list[str]:
    return [call.request_id for call in slot.calls.values()]


def stats(counted: int = 0, num_running: int = 0) -> tuple[int, ...]:
    """Blocks: 10, of which 4 are free."""
    return (num_running, 0, counted, 10, 4, 0, BLOCK_SIZE, counted, counted)


def group(call: Call, *, index: int = 0, is_last: bool = True) -> tuple[str, list[Any]]:
    reason = FinishReason.STOP if is_last else None
    output = RequestOutput(request_id=call.request_id, index=index, text="x", finish_reason=reason)
    return call.ticket, [pack_output(output)]


# --- routing -------------------------------------------------------------------------------------


def test_the_replica_with_the_least_to_do_gets_it() -> None:
    dispatcher, slots = make(3)
    for i in range(7):
        dispatcher.add(call(str(i), prefix=i))
    assert [len(slot.calls) for slot in slots] == [3, 2, 2]
    done = next(iter(slots[0].calls.values()))
    dispatcher.take(slots[0], [group(done)], stats())
    dispatcher.take(slots[0], [group(next(iter(slots[0].calls.values())))], stats())
    dispatcher.add(call("next", prefix=9))
    assert "next" in names(slots[0])


def test_the_same_beginning_goes_to_the_same_replica_within_the_slack() -> None:
    dispatcher, slots = make(3, slack=2)
    dispatcher.add(call("other", prefix=5))
    for i in range(3):
        dispatcher.add(call(str(i), prefix=1))
    assert names(slots[1]) == ["0", "1", "2"]  # the others had less to do
    dispatcher.add(call("3", prefix=1))
    assert names(slots[2]) == ["3"]  # three more than the least are too many
    dispatcher.add(call("4", prefix=1))
    assert names(slots[2]) == ["3", "4"]  # which knows the beginning from now on


def test_a_prefix_of_a_replica_that_takes_nothing_goes_elsewhere() -> None:
    dispatcher, slots = make(2)
    dispatcher.add(call("a", prefix=1))
    dispatcher.stand_down(slots[0])
    dispatcher.add(call("b", prefix=1))
    assert (names(slots[0]), names(slots[1])) == (["a"], ["b"])


def test_the_router_forgets_the_oldest() -> None:
    router, slots = Router(slack=1), [Slot(0, None), Slot(1, None)]
    router.choose(slots[1:], (0,))
    for i in range(1, MAX_PREFIXES):
        router.choose(slots, (i,))
    assert router.choose(slots, (0,)) is slots[1]
    for i in range(1, MAX_PREFIXES + 1):
        router.choose(slots, (i,))
    assert router.choose(slots, (0,)) is slots[0]


SYSTEM = list(range(600))


def test_a_conversation_stays_where_its_history_is() -> None:
    """Although every conversation begins with the same long system prompt."""
    router, slots = Router(slack=2), [Slot(0, None), Slot(1, None)]
    turns = {name: [*SYSTEM, *[1000 + name] * 400] for name in range(2)}
    for name, ids in turns.items():
        assert router.choose([slots[name]], prefix_keys(ids)) is slots[name]
    for name in (0, 1, 1, 0):
        turns[name] += [2000] * 150
        assert router.choose(slots, prefix_keys(turns[name])) is slots[name]


def test_a_replica_with_too_much_to_do_is_no_place_for_a_long_history() -> None:
    """Then the next best is the one that knows less of it."""
    router, slots = Router(slack=2), [Slot(i, None) for i in range(3)]
    router.choose([slots[1]], prefix_keys(SYSTEM))
    ids = [*SYSTEM, *[7] * 600]
    router.choose([slots[2]], prefix_keys(ids))
    router.choose([slots[1]], prefix_keys([*SYSTEM, 5]))
    slots[2].calls = {str(i): call(str(i)) for i in range(3)}
    assert router.choose(slots, prefix_keys([*ids, 8])) is slots[1]


@given(
    st.lists(st.integers(0, 9), max_size=900), st.lists(st.integers(0, 9), max_size=900), st.data()
)
def test_keys_name_four_fifths_of_what_is_shared(
    first: list[int], second: list[int], data: st.DataObject
) -> None:
    shared = data.draw(st.integers(0, len(first)))
    second = [*first[:shared], 10, *second]
    keys = prefix_keys(first), prefix_keys(second)
    common = sum(a == b for a, b in zip(*keys, strict=False))
    lengths = key_lengths(len(first))
    assert all(length % PREFIX_TOKENS == 0 for length in lengths)
    known = lengths[common - 1] if common else 0
    assert known <= shared
    assert known >= (shared // PREFIX_TOKENS * PREFIX_TOKENS) / GROWTH - PREFIX_TOKENS
    assert not set(prefix_keys(first, "salt")) & set(keys[0])


def key_lengths(count: int) -> list[int]:
    """How many tokens each key names, by what changes with one of them."""
    ids = list(range(count))
    keys = prefix_keys(ids)
    found = []
    for number, key in enumerate(keys):
        low, high = 0, count
        while low < high:  # the shortest prompt that has this key
            middle = (low + high) // 2
            has = prefix_keys(ids[:middle])[number : number + 1] == (key,)
            low, high = (low, middle) if has else (middle + 1, high)
        found.append(low)
    return found


def test_what_is_shorter_than_a_block_goes_anywhere() -> None:
    assert prefix_keys(range(PREFIX_TOKENS - 1)) == ()
    router, slots = Router(slack=9), [Slot(0, None), Slot(1, None)]
    assert router.choose(slots, ()) is slots[0]
    slots[0].calls = {"a": call("a")}
    assert router.choose(slots, ()) is slots[1]


# --- sums ----------------------------------------------------------------------------------------


def test_statistics_are_sums() -> None:
    dispatcher, slots = make(2)
    dispatcher.take(slots[0], [], stats(counted=5, num_running=1))
    dispatcher.take(slots[1], [], stats(counted=7, num_running=2))
    found = dispatcher.stats(BLOCK_SIZE)
    assert (found.num_running, found.num_blocks, found.num_free_blocks) == (3, 20, 8)
    assert (found.num_queried_tokens, found.num_hit_tokens, found.num_preemptions) == (12, 12, 12)
    assert found.block_size == BLOCK_SIZE


def test_counters_never_fall() -> None:
    """Whatever happens to replicas; gauges are those of the ones that are there."""
    dispatcher, slots = make(2)
    before = 0

    def check(counted: int, num_blocks: int) -> None:
        nonlocal before
        found = dispatcher.stats(BLOCK_SIZE)
        assert found.num_queried_tokens == found.num_preemptions == counted >= before
        assert found.num_blocks == num_blocks
        before = counted

    dispatcher.take(slots[0], [], stats(counted=5))
    dispatcher.take(slots[1], [], stats(counted=7))
    check(12, 20)
    dispatcher.lose(slots[0])
    check(12, 10)
    dispatcher.bring_up(slots[0])  # it counts from 0 again
    dispatcher.take(slots[0], [], stats(counted=1))
    check(13, 20)
    new = Slot(1, Actor())
    assert dispatcher.replace(slots[1], new)
    dispatcher.take(slots[1], [], stats(counted=8))  # the old one, which still drains
    check(14, 20)
    dispatcher.bring_up(new)
    dispatcher.take(new, [], stats(counted=2))
    check(16, 30)
    dispatcher.end(slots[1])
    check(16, 20)
    dispatcher.take(slots[1], [], stats(counted=9))  # it was on its way
    check(16, 20)
    dispatcher.lose(slots[1])
    check(16, 20)


def test_a_replaced_replica_that_dies_counts_once() -> None:
    dispatcher, slots = make(1)
    dispatcher.take(slots[0], [], stats(counted=5))
    dispatcher.replace(slots[0], Slot(0, Actor()))
    assert dispatcher.num_draining == 1
    dispatcher.lose(slots[0])
    assert dispatcher.num_draining == 0
    assert dispatcher.stats(BLOCK_SIZE).num_queried_tokens == 5
    dispatcher.end(slots[0])
    assert dispatcher.stats(BLOCK_SIZE).num_queried_tokens == 5


# --- replacing -----------------------------------------------------------------------------------


def test_a_replaced_replica_ends_what_it_has_and_gets_nothing() -> None:
    dispatcher, (old, other) = make(2)
    first = call("first")
    dispatcher.add(first)
    assert names(old) == ["first"]
    new = Slot(0, Actor(), is_up=True)
    assert dispatcher.replace(old, new)
    assert (dispatcher.num_up, dispatcher.num_draining) == (2, 1)
    for i in range(4):
        dispatcher.add(call(str(i), prefix=i))
    assert names(old) == ["first"]
    assert (len(new.calls), len(other.calls)) == (2, 2)
    assert not dispatcher.wait_drained(old, 0.0)
    ((answered, outputs),) = dispatcher.take(old, [group(first)], stats())
    assert answered is first
    assert outputs[0].is_finished
    assert dispatcher.wait_drained(old, 0.0)
    assert dispatcher.end(old) == (0, [])
    assert dispatcher.num_draining == 0


def test_what_did_not_end_in_time_starts_again_but_for_streams_that_have_begun() -> None:
    dispatcher, (old, other) = make(2)
    dispatcher.stand_down(other)
    whole, fresh, begun = call("whole", n=2), call("fresh", is_streaming=True), call("begun")
    begun.is_streaming = True
    for request in (whole, fresh, begun):
        dispatcher.add(request)
    dispatcher.take(old, [group(whole, index=0), group(begun, is_last=False)], stats())
    other.is_leaving = False
    dispatcher.stand_down(old)
    count, told = dispatcher.end(old)
    assert count == 3
    ((failed, outputs),) = told
    assert failed is begun
    assert outputs[0].error == "the replica that answered was replaced"
    assert names(other) == ["whole", "fresh"]
    assert whole.num_losses == 0  # nothing is suspected of it
    # of the first output nothing comes a second time
    again = [group(whole, index=0), group(whole, index=1)]
    found = [output for _, outputs in dispatcher.take(other, again, stats()) for output in outputs]
    assert [output.index for output in found] == [1]


def test_while_nobody_is_up_requests_wait() -> None:
    dispatcher, (only,) = make(1)
    dispatcher.stand_down(only)
    dispatcher.add(call("a"))
    assert names(only) == []
    dispatcher.end(only)
    new = Slot(0, Actor())
    assert dispatcher.replace(only, new)
    assert dispatcher.num_up == 0
    dispatcher.bring_up(new)
    assert names(new) == ["a"]
    assert new.actor.calls[0][0] == "submit"


def test_an_abort_reaches_a_replaced_replica() -> None:
    dispatcher, (old,) = make(1)
    dispatcher.add(left := call("left"))
    ticket = left.ticket
    dispatcher.replace(old, Slot(0, Actor(), is_up=True))
    ((aborted, outputs),) = dispatcher.abort("left")
    assert aborted is left
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
    assert old.actor.calls[-1] == ("abort", ticket)
    assert dispatcher.wait_drained(old, 0.0)


def test_an_abort_ends_what_is_open_and_only_once() -> None:
    """Whoever counts open sequences hears of each; what the replica says later is nobody's."""
    dispatcher, (slot,) = make(1)
    dispatcher.add(some := call("some", n=3))
    dispatcher.take(slot, [group(some, index=1)], stats())
    ((_, outputs),) = dispatcher.abort("some")
    assert [output.index for output in outputs] == [0, 2]
    assert all(output.is_finished for output in outputs)
    assert dispatcher.abort("some") == []
    assert dispatcher.take(slot, [group(some, index=0)], stats()) == []
    dispatcher.stand_down(slot)
    dispatcher.add(call("queued"))
    ((_, outputs),) = dispatcher.abort("queued")
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]


def test_a_suspect_that_waits_is_not_left_behind() -> None:
    """It waits for a replica of its own; the one it waited for is replaced."""
    dispatcher, (old,) = make(1)
    suspect, other = call("suspect"), call("other")
    suspect.num_losses = 2
    dispatcher.add(other)
    dispatcher.add(suspect)
    assert old.suspect is suspect
    assert names(old) == ["other"]
    new = Slot(0, Actor(), is_up=True)
    dispatcher.replace(old, new)
    assert old.suspect is None
    assert names(new) == ["suspect"]


def test_a_request_goes_with_its_age() -> None:
    """Clocks of two machines have nothing in common; it counts on while nobody takes it."""
    dispatcher, (slot,) = make(1)
    dispatcher.stand_down(slot)
    old = call("old")
    old.arrival -= 100.0
    dispatcher.add(old)
    slot.is_leaving = False
    dispatcher.bring_up(slot)
    name, ticket, frame, age_s, count = slot.actor.calls[0]
    assert (name, ticket, frame, count) == ("submit", old.ticket, b"", 1)
    assert 100.0 <= age_s < 100.0 + PATIENCE_S


def test_when_nobody_can_be_loaded_requests_end() -> None:
    """Whichever comes last: one that was lost, or one that was to take a place."""
    dispatcher, slots = make(2)
    dispatcher.lose(slots[0])
    assert dispatcher.give_up(slots[0], "no memory") == []
    dispatcher.end(slots[1])
    new = Slot(1, Actor())
    dispatcher.replace(slots[1], new)
    dispatcher.add(call("a"))
    ((_, outputs),) = dispatcher.give_up(new, "no weights")
    assert outputs[0].error == "every replica is lost: no weights"
    assert dispatcher.error is not None


def test_the_end_is_told_once() -> None:
    dispatcher, (slot, _) = make(2)
    dispatcher.add(call("a"))
    ((_, outputs),) = dispatcher.end_all(EngineClosedError("all is over"))
    assert outputs[0].error == "all is over"
    assert dispatcher.end_all(EngineClosedError("again")) == []
    assert not dispatcher.bring_up(slot)
    assert not dispatcher.replace(slot, Slot(0, Actor()))
    assert dispatcher.take(slot, [], stats()) == []
    with pytest.raises(EngineClosedError, match="all is over"):
        dispatcher.add(call("b"))
