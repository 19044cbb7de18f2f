"""Compile the kernels of captured steps for a Hopper GPU, on a machine without one.

    TRITON_CACHE_DIR=cache python -m benchmarks.kernels.compile_ahead --model qwen3-0.6b

Runs the steps on the CPU with every launch replaced by a compilation, and lists what was compiled:
which variants a start needs, how long each takes, its registers and spills. It checks that every
variant compiles, and fills a cache that the same Triton on a GPU machine can use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.engine.workloads import SHAPES
from nvcli import kernels
from nvcli.config import EngineConfig
from nvcli.engine import cuda_graph
from nvcli.engine.model_runner import ModelRunner
from nvcli.engine.step_sampler import StepSampler
from nvcli.kernels import launch, library, reference
from nvcli.kernels.all_reduce import ShortSums
from nvcli.kernels.triton_attention import TritonAttention
from nvcli.layers.linear import Linear
from nvcli.models.config import ModelConfig
from nvcli.models.qwen3 import Qwen3ForCausalLM
from nvcli.parallel import TPGroup, short_rows

HOPPER_SMS = 132


class NoGpu:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Stands in for launches; remembers every variant."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}
        self._run = JITFunction.run

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        start = time.perf_counter()
        kernel = self._run(function, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in self.kernels:
            self.kernels[kernel.hash] = kernel
            print(f"{time.perf_counter() - start:6.1f} s  {resources(kernel)}", flush=True)
        return kernel


def compile_only() -> Compiler:
    """From here on launches compile for a Hopper GPU, and do nothing else."""
    compiler = Compiler()
    triton.runtime.driver.set_active(NoGpu())
    JITFunction.run = lambda function, *a, **k: compiler.run(function, *a, **k)
    launch.uses_pdl = lambda device: True
    return compiler


def resources(kernel: Any) -> str:
    """Name, warps, registers, shared memory and spills, as the assembler reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        run = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    usage = next((line.split() for line in run.stdout.splitlines() if "REG:" in line), [])
    found = [word for word in usage if word.startswith(("REG", "STACK", "LOCAL"))]
    meta = kernel.metadata
    return f"{meta.name:<24} warps {meta.num_warps} shared {meta.shared} {' '.join(found)}"


class RankAlone(TPGroup):
    """Rank 0 of a group of which nobody else is there: its share, its kernels, no exchange."""

    def __init__(self, size: int, columns: int, *, fuses_norm: bool) -> None:
        super().__init__(0, size)
        if size > 1:
            self.short = ShortSums(
                *(0, [(rank + 1) << 40 for rank in range(size)]),
                rows=short_rows(size, columns, 2),
                columns=columns,
                dtype=torch.bfloat16,
                device=torch.device("cpu"),
                fuses_norm=fuses_norm,
            )

    def library_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        everyone = x.repeat(1, self.size)
        return everyone if out is None else out.copy_(everyone)


def capture_steps(
    model: dict[str, Any], options: dict[str, Any], size: int = 1, *, deterministic: bool = False
) -> None:
    """What a start runs to find its kernels, with one layer of the model on so many GPUs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(model | {"num_hidden_layers": 1}))
        config = EngineConfig(
            device="cpu",
            dtype="bfloat16",
            load_format="dummy",
            num_blocks=64,
            max_num_seqs=256,
            max_num_batched_tokens=1024,
            **options,
        )
        attention = TritonAttention(is_uniform=deterministic)
        attention._num_sms = HOPPER_SMS
        model_config = ModelConfig.from_hf(folder)
        model_config.check_tensor_parallel(size)
        group = RankAlone(size, model_config.hidden_size, fuses_norm=not deterministic)
        runner = ModelRunner(folder, model_config, config, attention=attention, group=group)
    assert isinstance(runner.model, Qwen3ForCausalLM)
    if not deterministic:
        with torch.inference_mode():
            runner.model.fold_norms()
    for module in runner.model.modules():
        if isinstance(module, Linear):
            module.deterministic = deterministic
    runner._step_sampler = StepSampler(runner.state, runner.sampler, runner.vocab_size)
    graphs = cuda_graph.GraphRunner(
        runner.model,
        runner.state,
        runner._step_sampler,
        attention,
        max_num_batched_tokens=1024,
        dtype=torch.bfloat16,
        shared=runner._make_shared_steps(),
    )
    with torch.inference_mode():
        graphs.run_each_kind()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", help=f"{', '.join(SHAPES)}, or a folder")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    compiler = compile_only()
    kernels._use_triton = lambda x: True
    kernels.keeps_fp8 = lambda device: True

    def no_product(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        return x.new_zeros(x.shape[0], weight.shape[0])

    reference.linear = no_product
    library.linear = lambda x, weight, out=None: no_product(x, weight) if out is None else out
    library.add_linear = lambda x, weight, total: total
    kernels._use_fast = False
    shape = SHAPES.get(args.model)
    folder = Path(args.model)
    model = shape.config() if shape else json.loads((folder / "config.json").read_text())
    options = {"max_model_len": args.max_model_len, "kv_cache_dtype": args.kv_cache_dtype}
    capture_steps(model, options, args.tensor_parallel_size, deterministic=args.deterministic)
    print(f"{len(compiler.kernels)} variants in {os.environ.get('TRITON_CACHE_DIR', '~/.triton')}")
    build_launchers(list(compiler.kernels.values()))


def build_launchers(compiled: list[Any]) -> None:
    """The small C modules that launch them, where a libcuda to link with is at hand."""
    if "TRITON_LIBCUDA_PATH" not in os.environ:
        return
    from triton.backends.nvidia import driver

    builds: list[Any] = [driver.CudaUtils]
    builds += [partial(driver.CudaLauncher, kernel.src, kernel.metadata) for kernel in compiled]
    for build in builds:
        with suppress(ImportError):  # built and kept; it cannot be loaded here
            build()


if __name__ == "__main__":
    main()
