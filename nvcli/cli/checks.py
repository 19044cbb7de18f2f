"""The checks of `nvcli doctor`, each a line: software, driver, GPU, model, memory, terminal."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvcli import __version__
from nvcli.cli.console import is_terminal
from nvcli.cli.models import find_local, size_text
from nvcli.errors import NvcliError
from nvcli.paths import check_current_folder
from nvcli.types import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvcli.config import EngineConfig
    from nvcli.models.config import ModelConfig
    from nvcli.models.verify import Weights

OLDEST_CAPABILITY = (7, 5)
DRIVER_FILE = Path("/proc/driver/nvidia/version")


class State(StrEnum):
    OK = "ok"
    NOTE = "note"  # nothing to do
    WARN = "warn"  # works, but not as well as it could
    FAIL = "fail"  # blocks the chosen model on the chosen device


@dataclass(frozen=True)
class Check:
    name: str
    state: State
    text: str
    hint: str | None = None


def run_checks(config: EngineConfig) -> Iterator[Check]:
    yield Check("nvcli", State.OK, f"{__version__}, Python {platform.python_version()}")
    try:
        check_current_folder()
    except NvcliError as exc:
        yield Check("folder", State.FAIL, exc.message, exc.hint)
        return
    yield from _software()
    yield _driver()
    device: Any = None
    try:
        from nvcli.engine.device_choice import resolve_device

        device = resolve_device(config.device)
    except NvcliError as exc:
        yield Check("device", State.FAIL, exc.message, exc.hint)
    else:
        yield from _device(device)
    model: ModelConfig | None = None
    try:
        folder = find_local(config.model)
        model, weights = yield from _model(config, folder)
    except NvcliError as exc:
        yield Check("model", State.FAIL, exc.message, exc.hint)
    if model is not None and device is not None:
        yield _attention(config, model, device)
        yield _memory(config, model, weights, device)
    yield _port()
    yield _terminal()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _software() -> Iterator[Check]:
    import torch

    cuda = torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    yield Check("torch", State.OK if cuda else State.NOTE, f"{torch.__version__}, {build}")
    triton = _version("triton")
    missing = Check("triton", State.WARN, "not installed: torch's kernels run instead")
    yield Check("triton", State.OK, triton) if triton else missing
    found = [
        f"{label} ({module})"
        for label, module in (("FA3", "flash_attn_interface"), ("FA2", "flash_attn"))
        if importlib.util.find_spec(module) is not None
    ]
    text = ", ".join(found) or "not installed; torch's attention runs"
    yield Check("flash-attn", State.OK if found else State.NOTE, text)


def _driver() -> Check:
    version = ""
    try:
        match = re.search(r"Kernel Module\D*([\d.]+)", DRIVER_FILE.read_text())
        version = match[1] if match else ""
    except OSError:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # it is not there, or hangs
            found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
            version = found.stdout.split("\n")[0].strip()
    if not version:
        return Check("driver", State.NOTE, "no NVIDIA driver found")
    return Check("driver", State.OK, f"NVIDIA {version}")


def _device(device: Any) -> Iterator[Check]:
    if device.type == "cpu":
        from nvcli.engine.kv_cache import available_memory

        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        memory = size_text(available_memory())
        yield Check("device", State.NOTE, f"CPU, {cores} cores, {memory} of memory available")
        return
    import torch

    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        text = (
            f"{name}, compute capability {capability[0]}.{capability[1]},"
            f" {size_text(free)} of {size_text(total)} free"
        )
        is_old = capability < OLDEST_CAPABILITY
        hint = "Triton needs 7.5 or newer." if is_old else None
        yield Check(f"cuda:{index}", State.FAIL if is_old else State.OK, text, hint)


def _model(config: EngineConfig, folder: Path) -> Any:
    """Yields checks, returns (configuration, weights)."""
    from nvcli.models.config import ModelConfig
    from nvcli.models.verify import DamagedFileError, read_weights
    from nvcli.text import Tokenizer

    model = ModelConfig.from_hf(folder)
    weights: Weights | None = None
    try:
        weights = read_weights(folder)
        problem = None if weights.files else "it has no safetensors files"
    except DamagedFileError as exc:
        problem = str(exc)
    kind = f"{model.dtype} and fp8" if model.is_fp8 else model.dtype
    text = f"{config.model}, {model.architecture}, {model.num_layers} layers, {kind}"
    if problem is None:
        assert weights is not None
        yield Check("model", State.OK, f"{text}, {weights.num_parameters / 1e6:,.1f}M parameters")
    else:
        yield Check("model", State.FAIL, f"{config.model}: {problem}", "Fetch or copy it again.")
    try:
        tokenizer = Tokenizer.from_folder(folder)
        tokenizer.check_templates()
        size = tokenizer.size
        yield Check("tokenizer", State.OK, f"{size:,} tokens".replace(",", " "))
    except NvcliError as exc:
        yield Check("tokenizer", State.FAIL, exc.message, exc.hint)
    return model, weights


def _dtypes(config: EngineConfig, model: ModelConfig, device: Any) -> tuple[Any, Any]:
    from nvcli.engine.device_choice import resolve_dtype, resolve_kv_dtype

    dtype = resolve_dtype(config.dtype, device, model.dtype)
    return dtype, resolve_kv_dtype(config.kv_cache_dtype, dtype)


def _attention(config: EngineConfig, model: ModelConfig, device: Any) -> Check:
    from nvcli.kernels.attention import select_backend

    _, kv_dtype = _dtypes(config, model, device)
    try:
        backend, reason = select_backend(
            config.attention_backend,
            device=device,
            dtype=kv_dtype,
            head_dim=model.head_dim,
            block_size=config.block_size,
        )
    except NvcliError as exc:
        return Check("attention", State.FAIL, exc.message, exc.hint)
    is_slow = device.type == "cuda" and backend.name == "torch"
    return Check("attention", State.WARN if is_slow else State.OK, reason)


def _memory(
    config: EngineConfig, model: ModelConfig, weights: Weights | None, device: Any
) -> Check:
    """Weights and one full context, against what the engine would take."""
    from nvcli import kernels
    from nvcli.engine.kv_cache import DEFAULT_SHARE, available_memory, block_size_hint

    dtype, kv_dtype = _dtypes(config, model, device)
    length = config.max_model_len or model.max_model_len
    if length > model.max_model_len:
        text = f"a context of {length} is more than the model's {model.max_model_len} positions"
        return Check("memory", State.FAIL, text, f"Use --max-model-len {model.max_model_len}.")
    if weights is None or not weights.files:
        return Check("memory", State.NOTE, "unknown, as the weights cannot be read")
    share = config.memory_utilization or DEFAULT_SHARE[device.type]
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        budget = int(share * total) - (total - free)
    else:
        budget = int(share * available_memory())
    weight_bytes = weights.num_parameters * dtype.itemsize
    kept = ""
    if model.is_fp8 and kernels.keeps_fp8(device):
        # A byte each and their scales, of which there are few.
        weight_bytes -= weights.num_fp8 * (dtype.itemsize - 1)
        weight_bytes += 4 * weights.num_fp8 // FP8_BLOCK**2
    elif model.is_fp8:
        kept = f" (fp8 ones become {str(dtype).removeprefix('torch.')} here)"
    per_token = model.kv_elements_per_token * kv_dtype.itemsize
    room = max(budget - weight_bytes, 0) // per_token
    needed = weight_bytes + length * per_token
    text = (
        f"{size_text(weight_bytes)} of weights{kept} and {size_text(length * per_token)} for a"
        f" context of {length}; {size_text(max(budget, 0))} may be used"
    )
    blocks = 2 * config.block_size * per_token  # the least that the cache holds
    if weight_bytes + blocks > budget:
        hint = block_size_hint(budget - weight_bytes, per_token)
        if hint is not None:
            text += f"; two blocks of {config.block_size} tokens need {size_text(blocks)}"
        return Check("memory", State.FAIL, text, hint or "Free memory or choose a smaller model.")
    if needed <= budget:
        return Check("memory", State.OK, f"{text}, room for {room} tokens")
    if config.max_model_len is not None:
        return Check("memory", State.FAIL, text, f"Use --max-model-len {room} or less.")
    return Check("memory", State.WARN, text, f"The context will be {room} tokens.")


def _port() -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 8000))
        except OSError as exc:
            text = f"127.0.0.1:8000 cannot be used: {exc.strerror}"
            return Check("port", State.WARN, text, "Give serve another --port.")
    return Check("port", State.OK, "127.0.0.1:8000 is free for nvcli serve")


def _terminal() -> Check:
    encoding = (getattr(sys.stdout, "encoding", None) or "none").lower()
    term = os.environ.get("TERM", "")
    if not is_terminal(sys.stdout):
        return Check("terminal", State.NOTE, f"standard output is no terminal; {encoding}")
    columns, rows = shutil.get_terminal_size()
    color = "no colour" if os.environ.get("NO_COLOR") or term == "dumb" else "colour"
    if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        color = "24-bit colour"
    text = f"{term or 'TERM is not set'}, {columns}x{rows}, {encoding}, {color}"
    if "utf" not in encoding:
        return Check("terminal", State.WARN, text, "Set a UTF-8 locale, such as LANG=C.UTF-8.")
    if term in ("", "dumb"):
        return Check("terminal", State.WARN, text, "Without cursor movement: plain output only.")
    return Check("terminal", State.OK, f"{text}, bracketed paste")
