"""How decode attention cuts the keys of a step, and the tiles of prefill: shapes of Qwen3-0.6B.

A setting serves all shapes of its group, so it is judged by how far it is behind the best of each,
on average; the usual one stays where no other is ahead by more than noise. How many programs are
best depends on how many an SM holds, so each launch of the decode kernel is judged with its own
best, over a cache of 16 bits and over one of fp8. A row of `kernels.jsonl` has all that was
measured.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from benchmarks.kernels import candidates
from benchmarks.kernels.bandwidth import Layers, decode_layers, prefill_layer, seconds_in_graph
from benchmarks.kernels.table import NOISE
from benchmarks.rows import write_row
from nvcli.kernels import tuned
from nvcli.kernels.compiling import compiled_only
from nvcli.kernels.cuts import MANY_ROWS, Attention, DecodeLaunch, Split

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    Key = TypeVar("Key", bound=Hashable)
    IsTimeLeft = Callable[[], bool]
    Say = Callable[[str], None]

# By the largest step that is cut alike: rows, keys, and how many more or fewer a row may have.
# Those give or take 460 are workload A as its sequences end.
DECODE = {
    2: ((1, 400, 0), (1, 4096, 0), (1, 16_384, 0), (2, 2048, 0)),
    8: ((8, 400, 0), (8, 1024, 0)),
    16: ((16, 400, 0), (16, 1600, 460)),
    32: ((32, 400, 0), (32, 1024, 0), (24, 1500, 460)),
    64: ((64, 400, 0), (64, 1024, 0), (40, 1440, 460), (59, 1360, 460)),
    128: ((96, 1024, 0), (128, 400, 0), (80, 1260, 460), (103, 1160, 460)),
    192: ((192, 400, 0), (131, 800, 700), (142, 1000, 460), (170, 870, 460)),
    256: ((256, 400, 0), (218, 750, 460), (256, 1024, 896)),
}
PREFILL = ((8, 2048), (1, 16_384), (32, 128))

Bodies = dict[str, Layers]  # by shape
Times = dict[str, float]  # us a layer of each shape


class NoTimeError(Exception):
    """The sweep ends before its end."""


def tune_attention(is_time_left: IsTimeLeft, say: Say) -> dict[str, Any] | None:
    """What the table says of attention; None where the time did not do for all of it."""
    ask = tuned.attention
    usual = ask(torch.device("cuda", 0))
    metrics: dict[str, Any] = {}

    def try_out(what: str, bodies: Bodies, settings: list[Attention], best: Attention) -> Attention:
        times = sweep(bodies, {one: one for one in (best, *settings)}, is_time_left)
        found = choose(times, best)
        say(f"{what}: {difference(found, usual) or 'as it was'} {times[found]}; was {times[best]}")
        metrics[what] = [[difference(one, best), times[one]] for one in times]
        return found

    def with_fp8(best: Attention) -> Attention:
        try:
            bodies = {limit: decode_bodies(limit, fp8=True) for limit in DECODE}
            return tune_decode(best, bodies, metrics, is_time_left, say, is_fp8=True)
        except NoTimeError:
            say("no time for all of attention over an fp8 cache: it keeps its settings")
            return best

    try:
        compile_all(usual, say)
        bodies = {limit: decode_bodies(limit) for limit in DECODE}
        found = tune_decode(usual, bodies, metrics, is_time_left, say)
        few = {shape: body for shape, body in bodies[2].items() if is_early(shape, found)}
        tried = [replace(found, early_warps=warps) for warps in candidates.EARLY_WARPS]
        found = try_out("decode, early", few, tried, found) if few else found
        del bodies, few
        prefill = {f"{rows}x{n}": prefill_layer(rows, n) for rows, n in PREFILL}
        tried = [replace(found, **setting) for setting in candidates.PREFILL]
        found = try_out("prefill", prefill, tried, found)
        del prefill
        found = with_fp8(found)
    except NoTimeError:
        say("no time for all of attention: it keeps its settings")
        return None
    finally:
        tuned.attention = ask
    write_row("kernels", metrics=metrics, config={"what": "attention, us a layer by settings"})
    return asdict(found)


def tune_decode(
    usual: Attention,
    bodies: dict[int, Bodies],
    metrics: dict[str, Any],
    is_time_left: IsTimeLeft,
    say: Say,
    *,
    is_fp8: bool = False,
) -> Attention:
    """Each launch of the decode kernel with the best cut of each group, then the best launch; of
    steps of many rows a launch of their own.
    """
    kind = "decode, fp8" if is_fp8 else "decode"
    tried = candidates.FP8_LAUNCHES if is_fp8 else candidates.DECODE_LAUNCHES
    programs = candidates.FP8_PROGRAMS if is_fp8 else candidates.DECODE_PROGRAMS
    with_own: dict[Attention, Times] = {}
    now = (usual.decode(n, is_fp8=is_fp8) for n in (1, MANY_ROWS + 1))
    for launch in dict.fromkeys((*now, *tried)):
        splits: list[tuple[int, Split]] = []
        own: Times = {}
        for limit, shapes in bodies.items():
            before = usual.split(limit, is_fp8=is_fp8)
            numbers = {before.even, before.uneven, *programs[limit]}
            settings = {
                n: with_launch(usual, launch, ((1, Split(n, n)),), is_fp8=is_fp8)
                for n in sorted(numbers)
            }
            times = sweep(shapes, settings, is_time_left)
            split = choose_split(times, before)
            splits.append((limit, split))
            chosen = {s: times[split.even if is_even(s) else split.uneven][s] for s in shapes}
            own |= chosen
            what = f"{kind}, {limit} rows, {launch_name(launch)}"
            say(f"{what}: {split.even} and {split.uneven} programs an SM {chosen}")
            metrics[what] = [[n, times[n]] for n in times]
        with_own[with_launch(usual, launch, tuple(splits), is_fp8=is_fp8)] = own
    found = choose(with_own, next(iter(with_own)))
    if not is_fp8:
        found = best_of_both(with_own, bodies, usual)
    for n in (1, MANY_ROWS + 1):
        say(f"{kind}, {n} rows and more: {launch_name(found.decode(n, is_fp8=is_fp8))}")
    return found


def best_of_both(
    with_own: dict[Attention, Times], bodies: dict[int, Bodies], usual: Attention
) -> Attention:
    """The best launch and its cuts of steps of few rows, and of steps of many."""

    def best(rows: int) -> Attention:
        limits = [limit for limit in bodies if (limit > MANY_ROWS) == (rows > MANY_ROWS)]
        shapes = [shape for limit in limits for shape in bodies[limit]]
        launch = usual.decode(rows, is_fp8=False)
        before = next(one for one in with_own if one.decode(rows, is_fp8=False) == launch)
        times = {one: {shape: own[shape] for shape in shapes} for one, own in with_own.items()}
        return choose(times, before) if shapes else before

    few, many = best(1), best(MANY_ROWS + 1)
    names = (name for name in asdict(few) if name.startswith("many_"))
    splits = tuple((n, (many if n > MANY_ROWS else few).split(n)) for n, _ in few.splits)
    return replace(few, splits=splits, **{name: getattr(many, name) for name in names})


def with_launch(
    usual: Attention,
    launch: DecodeLaunch,
    splits: tuple[tuple[int, Split], ...],
    *,
    is_fp8: bool,
) -> Attention:
    kind = "fp8" if is_fp8 else "decode"
    values = {f"{kind}_{name}": value for name, value in asdict(launch).items()}
    if is_fp8:
        return replace(usual, **values, fp8_splits=splits)
    assert values.pop("decode_registers") == 0, "a setting of an fp8 cache alone"
    values |= {name.replace("decode", "many"): value for name, value in values.items()}
    return replace(usual, **values, splits=splits)


def launch_name(launch: DecodeLaunch) -> str:
    name = f"{launch.tile} keys, {launch.warps} warps, {launch.stages} stages"
    return f"{name}, {launch.registers} registers" if launch.registers else name


def choose_split(times: dict[int, Times], before: Split) -> Split:
    """By programs an SM: the best for rows of one length, and for others where some were tried."""

    def of(wanted: bool) -> dict[int, Times]:
        return {
            n: {shape: us for shape, us in found.items() if is_even(shape) == wanted}
            for n, found in times.items()
        }

    even = choose(of(True), before.even)
    uneven = choose(of(False), before.uneven) if any(of(False)[even]) else even
    return Split(even, uneven, before.wide)  # of shapes that are not among these


def compile_all(usual: Attention, say: Say) -> None:
    settings = [usual, *(replace(usual, **setting) for setting in candidates.PREFILL)]
    settings += [replace(usual, early_warps=warps) for warps in candidates.EARLY_WARPS]
    settings += [
        with_launch(usual, launch, usual.splits, is_fp8=is_fp8)
        for is_fp8 in (False, True)
        for launch in (candidates.FP8_LAUNCHES if is_fp8 else candidates.DECODE_LAUNCHES)
    ]
    with compiled_only(torch.device("cuda", 0)) as kernels:
        for one in settings:
            use(one)
            for rows in (1, 8, 64):  # without a plan, with one that is not sorted, and sorted
                decode_layers(rows, 16).body()
                decode_layers(rows, 16, fp8=True).body()
            prefill_layer(1, 128).body()
    say(f"{len(kernels)} kernels of attention compiled")


def decode_bodies(limit: int, *, fp8: bool = False) -> Bodies:
    return {
        shape_name(rows, keys, spread): decode_layers(rows, keys, spread=spread, fp8=fp8)
        for rows, keys, spread in DECODE[limit]
    }


def shape_name(rows: int, keys: int, spread: int) -> str:
    return f"{rows}x{keys}" + (f"+-{spread}" if spread else "")


def is_even(shape: str) -> bool:
    return "+-" not in shape


def is_early(shape: str, settings: Attention) -> bool:
    """Whether its programs ask for keys before their wait."""
    return int(shape.split("x")[0]) <= settings.early_rows


def use(settings: Attention) -> None:
    """From the next launch on."""
    tuned.attention = lambda device: settings


def sweep(
    bodies: Bodies, settings: dict[Key, Attention], is_time_left: IsTimeLeft
) -> dict[Key, Times]:
    times: dict[Key, Times] = {}
    for key, one in settings.items():
        use(one)
        for shape, layers in bodies.items():
            if not is_time_left():
                raise NoTimeError
            layers.batch.plan = None  # the one before was cut otherwise
            us = seconds_in_graph(layers.body, 4) / layers.num_layers * 1e6
            times.setdefault(key, {})[shape] = round(us, 2)
    return times


def choose(times: dict[Key, Times], usual: Key) -> Key:
    """The one that is least behind the best of every shape, by the geometric mean."""
    best = {shape: min(found[shape] for found in times.values()) for shape in times[usual]}

    def behind(one: Key) -> float:
        return math.exp(sum(math.log(times[one][s] / us) for s, us in best.items()) / len(best))

    found = min(times, key=behind)
    return found if behind(found) < (1 - NOISE) * behind(usual) else usual


def difference(one: Attention, usual: Attention) -> dict[str, Any]:
    other = asdict(usual)
    return {name: value for name, value in asdict(one).items() if value != other[name]}
