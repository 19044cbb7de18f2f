"""GB/s of our kernels, and TFLOP/s of those that compute, each in a CUDA graph over rotated data.

    python -m benchmarks.kernels.bandwidth [products decode shared experts small prefill]

Data is several times the L2 cache, so that nothing is read twice from it; a graph holds many calls,
so that launching costs what it costs inside a captured step. Appends a row a kind to
`benchmarks/results/kernels.jsonl`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine.workloads import SHAPES
from benchmarks.rows import write_row
from nvcli import kernels
from nvcli.kernels import attention_plan, launch, rotary_store, sampling, tuned
from nvcli.kernels.triton_attention import TritonAttention
from nvcli.layers.forward_batch import ForwardBatch
from nvcli.types import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Note = Callable[[str, dict[str, Any]], None]

KINDS = ("products", "decode", "shared", "experts", "small", "prefill")
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 8, 128, 16  # of Qwen3-0.6B
DATA_BYTES = 2 << 30  # rotated over
ATTENTION = [
    (1, 256),
    (1, 1024),
    (1, 4096),
    (2, 256),
    (4, 256),
    (8, 256),
    (8, 1024),
    (32, 256),
    (32, 1024),
    (64, 1024),
    (256, 256),
]
ATTENTION += [(131, 800), (256, 1024)]
# Workload A as its sequences end: prompts of 100 to 1,024 tokens, and as many generated for each.
UNEVEN = [(256, 590, 460), (218, 750, 460), (103, 1160, 460), (59, 1360, 460), (24, 1500, 460)]
SHARED = [(256, 2048, 96), (64, 2048, 96), (16, 2048, 300), (256, 192, 300), (8, 32_768, 500)]


def seconds_in_graph(body: Callable[[], Any], replays: int = 10) -> float:
    """Of one call of `body`: the best of three rounds of replays."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    best = float("inf")
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / replays)
    return best


def measure_attention(
    rows: int, keys: int, *, spread: int = 0, fp8: bool = False
) -> dict[str, float]:
    """One decode step's attention, of rows of `keys` give or take up to `spread`."""
    layers = decode_layers(rows, keys, spread=spread, fp8=fp8)
    seconds = seconds_in_graph(layers.body, 4) / layers.num_layers
    return {"us": seconds * 1e6, "gb_s": layers.num_bytes / seconds / 1e9}


@dataclass(frozen=True, slots=True)
class Layers:
    """Attention of one step. `batch.plan` is made by the first call of `body` and then kept."""

    body: Callable[[], Any]
    batch: ForwardBatch
    num_layers: int = 1
    num_bytes: int = 0  # of keys and values of a layer


def decode_layers(rows: int, keys: int, *, spread: int = 0, fp8: bool = False) -> Layers:
    blocks_per_row = -(-(keys + spread) // BLOCK)
    num_blocks = rows * blocks_per_row
    element_bytes = 1 if fp8 else 2
    layer_bytes = 2 * num_blocks * BLOCK * KV_HEADS * HEAD_DIM * element_bytes
    num_layers = max(2, min(28, DATA_BYTES // layer_bytes))
    shape = (num_layers, 2, num_blocks, KV_HEADS, BLOCK, HEAD_DIM)
    pool = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(3, 4)
    scales = None
    if fp8:
        pool = pool.to(torch.float8_e4m3fn)
        scales = torch.ones(2, KV_HEADS, device="cuda")
    table = torch.randperm(num_blocks, device="cuda").int().view(rows, blocks_per_row)
    lens = torch.linspace(keys - spread, keys + spread, rows, device="cuda").int()
    q = torch.randn(rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    batch = decode_batch(lens, table)

    def body() -> None:
        for layer in pool:
            batch.attention.forward(q, layer[0], layer[1], batch, HEAD_DIM**-0.5, scales)

    num_bytes = 2 * int(lens.sum()) * KV_HEADS * HEAD_DIM * element_bytes
    return Layers(body, batch, num_layers, num_bytes)


def decode_batch(lens: torch.Tensor, table: torch.Tensor) -> ForwardBatch:
    """As a captured step of one token a row has it."""
    rows = lens.shape[0]
    one = torch.ones_like(lens)
    index = torch.arange(rows, dtype=torch.int32, device="cuda")
    return ForwardBatch(
        input_ids=lens,
        positions=lens,
        slot_mapping=lens,
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        seq_lens=lens,
        slots=torch.arange(rows, device="cuda"),
        block_table=table,
        logits_indices=lens,
        kv_caches=[],
        attention=TritonAttention(),
        query_lens=[],
        key_lens=[],
        block_ids=[],
        is_padded=True,
        is_decode=True,
        rows=torch.stack([index, lens - 1, one, one], dim=1),
    )


def measure_shared(rows: int, prefix: int, own: int, *, fp8: bool = False) -> dict[str, Any]:
    """One decode step's attention where all rows begin with the same `prefix` keys: those read for
    every row, and read once. `gb_s` counts each key once.
    """
    own_blocks, prefix_blocks = -(-own // BLOCK), prefix // BLOCK
    num_blocks = prefix_blocks + rows * own_blocks
    element_bytes = 1 if fp8 else 2
    layer_bytes = 2 * num_blocks * BLOCK * KV_HEADS * HEAD_DIM * element_bytes
    num_layers = max(2, min(28, DATA_BYTES // layer_bytes))
    shape = (num_layers, 2, num_blocks, KV_HEADS, BLOCK, HEAD_DIM)
    pool = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(3, 4)
    scales = None
    if fp8:
        pool = pool.to(torch.float8_e4m3fn)
        scales = torch.ones(2, KV_HEADS, device="cuda")
    ids = torch.randperm(num_blocks, device="cuda").int()
    first = ids[:prefix_blocks].expand(rows, -1)
    table = torch.cat([first, ids[prefix_blocks:].view(rows, own_blocks)], dim=1).contiguous()
    lens = torch.full((rows,), prefix_blocks * BLOCK + own, dtype=torch.int32, device="cuda")
    q = torch.randn(rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    moved = 2 * (prefix + rows * own) * KV_HEADS * HEAD_DIM * element_bytes
    found: dict[str, Any] = {}
    for name in ("for_every_row", "once"):
        batch = decode_batch(lens, table)
        if name == "once":
            assert isinstance(batch.attention, TritonAttention)
            prefixes = batch.attention.shared_prefixes(HEADS, KV_HEADS, BLOCK, lens.device)
            assert prefixes is not None, "NVCLI_SHARED_PREFIX=0"
            groups = prefixes.find(table.tolist(), lens.tolist())
            assert groups, "not worth it"
            work = prefixes.allocate(rows, lens.device)
            work.send(prefixes.fill(work, groups, [1] * rows))
            batch.shared = work

        def body(batch: ForwardBatch = batch) -> None:
            for layer in pool:
                batch.attention.forward(q, layer[0], layer[1], batch, HEAD_DIM**-0.5, scales)

        seconds = seconds_in_graph(body, 4) / num_layers
        found[name] = {"us": seconds * 1e6, "gb_s": moved / seconds / 1e9}
    return found


def measure_products(rows: int, model: str = "qwen3-0.6b") -> dict[str, Any]:
    """The four products of a layer of the model, for some layers: ours, and the same as cuBLAS has
    them, or for fp8 weights as it has dense copies that are made each time.
    """
    shape, bf16 = SHAPES[model], torch.bfloat16
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    sizes = {
        "qkv": (width + 2 * shape.kv_heads * shape.head_dim, hidden),
        "o": (hidden, width),
        "gate_up": (2 * shape.inner, hidden),
        "down": (hidden, shape.inner),
    }
    layer_bytes = (1 if shape.fp8 else 2) * shape.body_params // shape.layers
    weights = [
        {name: _weight(n, k, fp8=shape.fp8) for name, (n, k) in sizes.items()}
        for _ in range(max(2, min(shape.layers, DATA_BYTES // layer_bytes)))
    ]
    norm = torch.ones(hidden, device="cuda", dtype=bf16)
    start = torch.randn(rows, hidden, device="cuda", dtype=bf16)
    heads = torch.randn(rows, width, device="cuda", dtype=bf16)

    def body() -> None:
        x, residual = start, start
        for layer in weights:
            (qkv, s_qkv), (o, s_o), (gate_up, s_gate_up), (down, s_down) = layer.values()
            _, residual = kernels.norm_linear(x, residual, norm, 1e-6, qkv, None, scales=s_qkv)
            x = kernels.linear(heads, o, None, scales=s_o, as_addends=True)
            inner, residual = kernels.norm_swiglu(
                x, residual, norm, 1e-6, gate_up, None, scales=s_gate_up
            )
            x = kernels.linear(inner, down, None, scales=s_down, as_addends=True)

    moved = sum(w.nbytes for layer in weights for w, _ in layer.values())
    found: dict[str, Any] = {"layers": len(weights)}
    for name, choice, pdl in (
        ("ours", "auto", True),
        ("without_pdl", "auto", False),
        ("cublas", "reference", False),
    ):
        kernels.set_kernels(choice)
        launch.set_pdl(pdl)
        seconds = seconds_in_graph(body)
        found[name] = {"us": seconds * 1e6, "gb_s": moved / seconds / 1e9}
    kernels.set_kernels("auto")
    launch.set_pdl(True)
    return found


def _weight(n: int, k: int, *, fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random, with its scales in fp8."""
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    if not fp8:
        return weight / k**0.5, None
    scales = torch.full((n // FP8_BLOCK, k // FP8_BLOCK), k**-0.5 / 64, device="cuda")
    return (64 * weight).to(torch.float8_e4m3fn), scales


def measure_small(rows: int) -> dict[str, float]:
    """us of the other kernels of a step, each alone in a graph."""
    bf16 = torch.bfloat16
    x = torch.randn(rows, 1024, device="cuda", dtype=bf16)
    wide = torch.randn(rows, 6144, device="cuda", dtype=bf16)
    qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda", dtype=bf16)
    weight = torch.ones(HEADS + KV_HEADS, HEAD_DIM, device="cuda", dtype=bf16)
    half = torch.randn(rows, HEAD_DIM // 2, device="cuda")
    cos, sin = half.cos().repeat(1, 2), torch.cat([-half.sin(), half.sin()], 1)
    cache = torch.zeros(rows + 1, KV_HEADS, BLOCK, HEAD_DIM, device="cuda", dtype=bf16)
    cache = cache.transpose(1, 2)
    slots = torch.arange(rows, device="cuda")
    logits = torch.randn(rows, 151_936, device="cuda", dtype=bf16)
    params_f = torch.zeros(rows, 8, device="cuda", dtype=torch.float64)
    params_f[:, :2] = torch.tensor([0.6, 1.0])
    nucleus = params_f.clone()
    nucleus[:, 1] = 0.95
    params_i = torch.zeros(rows, 8, device="cuda", dtype=torch.int64)
    top_20 = params_i.clone()
    top_20[:, 0] = 20
    penalised = params_i.clone()
    penalised[:, 4] = 1
    greedy = torch.zeros_like(params_f)
    greedy[:, 5] = 1.1
    counts = torch.zeros(rows, 151_936, device="cuda", dtype=torch.int32)
    tables = sampling.Tables(
        counts,
        counts.bool(),
        counts.float(),
        torch.zeros(rows, 16, device="cuda", dtype=torch.int32),
    )
    tokens = torch.zeros(rows, 64, device="cuda", dtype=torch.int32)
    out = torch.zeros(rows, device="cuda", dtype=torch.int32)
    counters = torch.zeros(rows, device="cuda", dtype=torch.int32)

    embedding = torch.randn(151_936, 1024, device="cuda", dtype=bf16)
    rotary = torch.randn(4096, 2, HEAD_DIM, device="cuda")
    ids = torch.randint(151_936, (rows,), device="cuda")

    def sample(f: Any, i: Any) -> None:
        sampling.sample(logits, slots, slots * 0, f, i, tokens, out, counters, 151_936, tables)

    bodies: dict[str, Callable[[], Any]] = {
        "add_rms_norm": lambda: kernels.add_rms_norm(x, x, x[0], 1e-6),
        "look_up": lambda: kernels.look_up(ids, slots, embedding, rotary, 0, 151_936),
        "silu_and_mul": lambda: kernels.silu_and_mul(wide),
        "silu_and_mul_late": lambda: kernels.silu_and_mul(wide, x, 1e-6),
        "rotary_store": lambda: rotary_store.rope_norm_store(
            qkv, weight, cos, sin, 1e-6, cache, cache, slots
        ),
        "rotary_store_late": lambda: rotary_store.rope_norm_store(
            qkv, weight, cos, sin, 1e-6, cache, cache, slots, None, x
        ),
        "sample_greedy": lambda: sample(greedy, params_i),
        "sample_random": lambda: sample(params_f, params_i),
        "sample_top_20": lambda: sample(nucleus, top_20),
        "sample_top_p": lambda: sample(nucleus, params_i),
        "sample_penalties": lambda: sample(greedy, penalised),
    }
    found = {}
    for name, body in bodies.items():

        def repeated(body: Callable[[], Any] = body) -> None:
            for _ in range(20):
                body()

        found[name] = 1e6 * seconds_in_graph(repeated) / 20
    return found


def measure_gather(tokens: int) -> dict[str, float]:
    """Keys and values of one row, from its pages into one piece a head."""
    shape = (2, tokens // BLOCK, KV_HEADS, BLOCK, HEAD_DIM)
    layers = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(2, 3) for _ in range(8)
    ]
    ids = torch.randperm(tokens // BLOCK, device="cuda").int()

    def body() -> None:
        for k, v in layers:
            kernels.gather_kv(k, v, ids)

    seconds = seconds_in_graph(body) / len(layers)
    return {"us": seconds * 1e6, "gb_s": 2 * layers[0].nbytes / seconds / 1e9}


def measure_prefill(rows: int, tokens: int) -> dict[str, float]:
    """Causal attention of whole prompts."""
    seconds = seconds_in_graph(prefill_layer(rows, tokens).body, 3)
    operations = 2 * rows * tokens * tokens * HEADS * HEAD_DIM
    return {"us": seconds * 1e6, "tflop_s": operations / seconds / 1e12}


def prefill_layer(rows: int, tokens: int) -> Layers:
    blocks = tokens // BLOCK
    shape = (2, rows * blocks, KV_HEADS, BLOCK, HEAD_DIM)
    k, v = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    lens = torch.full((rows,), tokens, dtype=torch.int32, device="cuda")
    q = torch.randn(rows * tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    backend = TritonAttention()
    batch = ForwardBatch(
        input_ids=lens,
        positions=lens,
        slot_mapping=lens,
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device="cuda") * tokens,
        seq_lens=lens,
        slots=torch.arange(rows, device="cuda"),
        block_table=torch.randperm(rows * blocks, device="cuda").int().view(rows, blocks),
        logits_indices=lens,
        kv_caches=[],
        attention=backend,
        query_lens=[tokens] * rows,
        key_lens=[],
        block_ids=[],
    )
    return Layers(lambda: backend.forward(q, k, v, batch, HEAD_DIM**-0.5), batch)


def measure_experts(rows: int) -> dict[str, float]:
    """Router and experts of a layer of 30B-A3B: all between two norms, with random routing. Of few
    rows the second norm adds up the experts.
    """
    bf16, shape = torch.bfloat16, SHAPES["qwen3-30b-a3b"]
    moe = shape.moe
    assert moe is not None
    X, E, F, K = moe.num_experts, shape.hidden, moe.intermediate_size, moe.num_experts_per_tok
    layers = [
        (
            torch.randn(X, E, device="cuda", dtype=bf16) / E**0.5,
            torch.randn(X, 2 * F, E, device="cuda", dtype=bf16) / E**0.5,
            torch.randn(X, E, F, device="cuda", dtype=bf16) / F**0.5,
        )
        for _ in range(6 if rows > 1 else 12)
    ]
    x = torch.randn(rows, E, device="cuda", dtype=bf16)
    hit = 0
    for router, _, _ in layers:
        ids, _ = kernels.route(kernels.linear(x, router, None), K, renormalise=True)
        hit += len(ids.unique())

    def body() -> None:
        for router, gate_up, down in layers:
            routed = kernels.route(kernels.linear(x, router, None), K, renormalise=True)
            kernels.experts(x, *routed, gate_up, down, as_addends=True)

    seconds = seconds_in_graph(body) / len(layers)
    hit_bytes = hit / len(layers) * shape.expert_params * 2
    return {
        "us": seconds * 1e6,
        "gb_s": hit_bytes / seconds / 1e9,
        "tflop_s": 2 * rows * K * shape.expert_params / seconds / 1e12,
    }


def measure_all(say: Callable[[str], None], kinds: Sequence[str] = KINDS) -> None:
    measures = {
        "products": _note_products,
        "decode": _note_decode,
        "shared": _note_shared,
        "experts": _note_experts,
        "small": _note_small,
        "prefill": _note_prefill,
    }
    shapes = "Qwen3-0.6B where none is named, experts of 30B-A3B"
    for kind in kinds:
        metrics: dict[str, Any] = {}

        def note(name: str, values: dict[str, Any], metrics: dict[str, Any] = metrics) -> None:
            metrics[name] = _rounded(values)
            say(f"{name}: {metrics[name]}")

        with torch.inference_mode():
            measures[kind](note)
        config = {"what": f"bandwidth, {kind}", "shapes": shapes, "dtype": "bfloat16"}
        write_row("kernels", metrics=metrics, config=config, prints=False)


def _note_products(note: Note) -> None:
    for rows in (1, 2, 4, 8, 16, 32, 64):
        note(f"products_{rows}", measure_products(rows))
    for model in ("qwen3-0.6b-fp8", "qwen3-8b", "qwen3-8b-fp8"):
        for rows in (1, 8, 32, 128, 256, 512):
            note(f"products_{rows}_{model}", measure_products(rows, model))


def _note_decode(note: Note) -> None:
    for rows, keys in ATTENTION:
        note(f"decode_{rows}x{keys}", measure_attention(rows, keys))
        if rows <= attention_plan.MAX_EARLY_ROWS:
            for name, early_rows in (("early", rows), ("planned", 0)):
                ask = tuned.attention
                settings = replace(ask(torch.device("cuda", 0)), early_rows=early_rows)
                tuned.attention = lambda device, found=settings: found
                note(f"{name}_{rows}x{keys}", measure_attention(rows, keys))
                tuned.attention = ask
    for rows, keys in ((1, 4096), (32, 1024), (131, 800), (256, 1024)):
        note(f"decode_fp8_{rows}x{keys}", measure_attention(rows, keys, fp8=True))
    note("decode_131x800_ragged", measure_attention(131, 800, spread=700))
    for rows, keys, spread in UNEVEN:
        note(f"decode_{rows}x{keys}+-{spread}", measure_attention(rows, keys, spread=spread))


def _note_shared(note: Note) -> None:
    for rows, prefix, own in SHARED:
        note(f"shared_{rows}x{prefix}+{own}", measure_shared(rows, prefix, own))
    note("shared_fp8_256x2048+96", measure_shared(256, 2048, 96, fp8=True))


def _note_experts(note: Note) -> None:
    for rows in (1, 2, 8, 32, 64, 256, 2048, 16_384):
        note(f"experts_{rows}", measure_experts(rows))


def _note_small(note: Note) -> None:
    for rows in (1, 256):
        note(f"small_{rows}", measure_small(rows))
    note("gather_16384", measure_gather(16_384))


def _note_prefill(note: Note) -> None:
    for rows, tokens in ((8, 2048), (1, 16_384)):
        note(f"prefill_{rows}x{tokens}", measure_prefill(rows, tokens))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return round(value, 1 if value >= 100 else 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; default: all")
    args = parser.parse_args()
    unknown = set(args.kinds) - set(KINDS)
    if unknown:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device")
    measure_all(lambda text: print(text, flush=True), args.kinds or KINDS)


if __name__ == "__main__":
    main()
