"""How decode attention cuts the keys of a step, and the tiles of prefill: shapes of Qwen3-0.6B.

A setting serves all shapes of its group, so it is judged by how far it is behind the best of each,
on average; the usual one stays where no other is ahead by more than noise. A row of `kernels.jsonl`
has all that was measured.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.kernels import candidates
from benchmarks.kernels.bandwidth import Layers, decode_layers, prefill_layer, seconds_in_graph
from benchmarks.kernels.table import NOISE
from benchmarks.rows import write_row
from nvcli.kernels import tuned
from nvcli.kernels.compiling import compiled_only
from nvcli.kernels.cuts import Attention

if TYPE_CHECKING:
    from collections.abc import Callable

# By the largest step that is cut alike: rows, keys, whether of uneven length.
DECODE = {
    8: ((1, 400, False), (1, 4096, False), (8, 400, False), (8, 1024, False)),
    32: ((16, 400, False), (32, 400, False), (32, 1024, False)),
    256: ((64, 400, False), (131, 800, True), (256, 400, False), (256, 1024, True)),
}
PREFILL = ((8, 2048), (1, 16_384), (32, 128))

Bodies = dict[str, Layers]  # by shape
Times = dict[Attention, dict[str, float]]  # us a layer of each shape


class NoTimeError(Exception):
    """The sweep ends before its end."""


def tune_attention(
    is_time_left: Callable[[], bool], say: Callable[[str], None]
) -> dict[str, Any] | None:
    """What the table says of attention; None where the time did not do for all of it."""
    ask = tuned.attention
    usual = ask(torch.device("cuda", 0))
    metrics: dict[str, Any] = {}

    def try_out(what: str, bodies: Bodies, settings: list[Attention], best: Attention) -> Attention:
        times = sweep(bodies, [best, *settings], is_time_left)
        found = choose(times, best)
        say(f"{what}: {difference(found, usual) or 'as it was'} {times[found]}; was {times[best]}")
        metrics[what] = [[difference(one, best), times[one]] for one in times]
        return found

    try:
        compile_all(usual, say)
        decode = {shape: body for limit in DECODE for shape, body in decode_bodies(limit).items()}
        splits = []
        for limit in DECODE:
            tried = [with_split(usual, cut) for cut in candidates.decode_splits(limit)]
            one = try_out(f"decode, {limit} rows", decode_bodies(limit), tried, usual)
            splits.append((limit, one.split(limit)))
        found = replace(usual, splits=tuple(splits))
        tried = [replace(found, **setting) for setting in candidates.DECODE_LAUNCHES]
        found = try_out("decode, launch", decode, tried, found)
        prefill = {f"{rows}x{n}": prefill_layer(rows, n) for rows, n in PREFILL}
        tried = [replace(found, **setting) for setting in candidates.PREFILL]
        found = try_out("prefill", prefill, tried, found)
    except NoTimeError:
        say("no time for all of attention: it keeps its settings")
        return None
    finally:
        tuned.attention = ask
    write_row("kernels", metrics=metrics, config={"what": "attention, us a layer by settings"})
    return asdict(found)


def compile_all(usual: Attention, say: Callable[[str], None]) -> None:
    settings = [replace(usual, **s) for s in (*candidates.DECODE_LAUNCHES, *candidates.PREFILL)]
    with compiled_only(torch.device("cuda", 0)) as kernels:
        for one in [usual, *settings]:
            use(one)
            for rows in (8, 16, 64):  # without a plan, with one that is not sorted, and sorted
                decode_layers(rows, 16).body()
            prefill_layer(1, 128).body()
    say(f"{len(kernels)} kernels of attention compiled")


def decode_bodies(limit: int) -> Bodies:
    return {
        f"{rows}x{keys}{' uneven' if ragged else ''}": decode_layers(rows, keys, ragged=ragged)
        for rows, keys, ragged in DECODE[limit]
    }


def with_split(usual: Attention, split: Any) -> Attention:
    """Settings that cut every step so."""
    return replace(usual, splits=((1, split),))


def use(settings: Attention) -> None:
    """From the next launch on."""
    tuned.attention = lambda device: settings


def sweep(bodies: Bodies, settings: list[Attention], is_time_left: Callable[[], bool]) -> Times:
    times: Times = {}
    for one in dict.fromkeys(settings):
        use(one)
        for shape, layers in bodies.items():
            if not is_time_left():
                raise NoTimeError
            layers.batch.plan = None  # the one before was cut otherwise
            us = seconds_in_graph(layers.body, 4) / layers.num_layers * 1e6
            times.setdefault(one, {})[shape] = round(us, 2)
    return times


def choose(times: Times, usual: Attention) -> Attention:
    """The one that is least behind the best of every shape, by the geometric mean."""
    best = {shape: min(found[shape] for found in times.values()) for shape in times[usual]}

    def behind(one: Attention) -> float:
        return math.exp(sum(math.log(times[one][s] / us) for s, us in best.items()) / len(best))

    found = min(times, key=behind)
    return found if behind(found) < (1 - NOISE) * behind(usual) else usual


def difference(one: Attention, usual: Attention) -> dict[str, Any]:
    other = asdict(usual)
    return {name: value for name, value in asdict(one).items() if value != other[name]}
