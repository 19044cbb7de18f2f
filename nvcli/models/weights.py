"""Safetensors on disk -> parameters, every tensor accounted for.

The model says which checkpoint tensor fills which rows of which parameter
(`Linear.checkpoint_parts`), so fused parameters are filled in place and "missing", "extra" and
"wrong shape" are set differences. Files are read in parallel, each tensor straight to the device
of its parameter; under tensor parallelism only this rank's share of it. Parameters are born as NaN,
and the last step proves that no NaN is left.

A tied head is a claim of the configuration that checkpoints contradict (vllm#6758, vllm#51665):
what the file holds decides, and a contradiction is a warning, never an uninitialised head.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from nvcli.errors import WeightsError
from nvcli.layers.linear import Embedding, Linear, Part
from nvcli.layers.moe import ExpertStack, StackedPart
from nvcli.parallel import Share

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator
    from pathlib import Path

    from torch import nn

    Target = Part | StackedPart

logger = logging.getLogger("nvcli")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEAD_NAME = "lm_head.weight"
EMBEDDING_NAME = "model.embed_tokens.weight"
MAX_READERS = 8
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
FP8 = torch.float8_e4m3fn
# Tables that old checkpoints save beside their weights; they follow from the configuration.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
DUMMY_STD = 0.02
DUMMY_FP8_STD = 64.0  # of fp8 weights before their scale: well inside of what fp8 holds


class CausalLM(Protocol):
    """What the loader needs of a model."""

    def modules(self) -> Iterable[nn.Module]: ...
    def named_modules(self) -> Iterable[tuple[str, nn.Module]]: ...
    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...
    def tie_head(self) -> None: ...


def load_weights(model: CausalLM, folder: Path, *, is_tied: bool) -> None:
    """Fill the model from the folder's safetensors files.

    Raises `WeightsError` naming the file and the tensor when anything is missing, left over,
    damaged or of another shape.
    """
    files = locate_tensors(folder)
    if HEAD_NAME not in files:
        model.tie_head()
    targets = checkpoint_targets(model, files)
    _match_names(targets, files, folder)
    _read_all(targets, files, folder)
    if HEAD_NAME not in files:
        if not is_tied:
            logger.warning("%s has no %s: the embedding serves as head", folder, HEAD_NAME)
    elif is_tied:
        if torch.equal(targets[HEAD_NAME].target, targets[EMBEDDING_NAME].target):
            model.tie_head()
        else:
            logger.warning(
                "%s: config.json ties the head to the embedding, but %s differs: it is kept",
                folder,
                HEAD_NAME,
            )
    _check_filled(targets, folder)
    _after_load(model)


def fill_dummy(model: CausalLM, *, is_tied: bool) -> None:
    """Seeded small random weights, norms of 1: for speed, memory and shape work."""
    if is_tied:
        model.tie_head()
    parts = _parts_by_parameter(model)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if "norm" in name:
            parameter.data.fill_(1.0)
            continue
        if name.endswith("weight_scale_inv"):
            parameter.data.fill_(DUMMY_STD / DUMMY_FP8_STD)
            continue
        generator = torch.Generator(parameter.device).manual_seed(index)
        is_fp8 = parameter.dtype == FP8
        if not is_fp8 and all(part.is_whole for part in parts[name]):
            parameter.data.normal_(0.0, DUMMY_STD, generator=generator)
            continue
        # A share of the same numbers that one rank alone would hold.
        shape = (sum(part.shape[0] for part in parts[name]), *parts[name][0].shape[1:])
        dtype = torch.float32 if is_fp8 else parameter.dtype
        whole = torch.empty(shape, dtype=dtype, device=parameter.device)
        whole.normal_(0.0, DUMMY_FP8_STD if is_fp8 else DUMMY_STD, generator=generator)
        start = 0
        for part in parts[name]:
            part.target.copy_(part.cut(whole[start : start + part.shape[0]]))
            start += part.shape[0]
    _after_load(model)


def _parts_by_parameter(model: CausalLM) -> dict[str, list[Part]]:
    """Parameter name -> its parts, one below the other."""
    found: dict[str, list[Part]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, part in _parts_of(module):
            found[f"{path}.{name.rpartition('.')[2]}"].append(part)
    return found


def _parts_of(module: nn.Module) -> Iterator[tuple[str, Part]]:
    """Names relative to the parent for `Linear`, to the module itself for others."""
    if isinstance(module, Linear | Embedding):
        yield from module.checkpoint_parts()
        return
    for name, parameter in module.named_parameters(recurse=False):
        shape = tuple(parameter.shape)
        yield name, Part(parameter.data, shape, Share.all_of(shape[0]))


def checkpoint_targets(model: CausalLM, names: Container[str]) -> dict[str, Target]:
    """Checkpoint name -> what of it fills which part of a parameter; together they cover all.

    names: of the checkpoint. Experts are tensors of their own, or one of all (transformers 5 can
    write them so): that one is known by its name.
    """
    targets: dict[str, Target] = {}
    covered = 0
    for path, module in model.named_modules():
        if isinstance(module, ExpertStack) and path in names:
            targets[path] = module.stacked_part()
            covered += module.weight.numel()
            continue
        prefix = path.rpartition(".")[0] if isinstance(module, Linear) else path
        for name, part in _parts_of(module):
            targets[f"{prefix}.{name}" if prefix else name] = part
            covered += part.rows.size * part.target.shape[1:].numel()
    tied = {id(p): p.numel() for _, p in model.named_parameters()}
    assert covered >= sum(tied.values()), "a parameter has rows that no checkpoint tensor fills"
    return targets


def locate_tensors(folder: Path) -> dict[str, tuple[str, str]]:
    """Tensor name -> (file, name inside it), from the index or else from the single file.

    Files that the index does not name, such as a consolidated duplicate, are left alone.
    Checkpoints of the bare model (Qwen3-Embedding) lack the `model.` prefix, which is added.
    """
    if (folder / INDEX_NAME).is_file():
        files = _read_index(folder)
    elif (folder / SINGLE_NAME).is_file():
        files = dict.fromkeys(_list_tensors(folder, SINGLE_NAME), SINGLE_NAME)
    else:
        raise _no_weights(folder)
    has_prefix = any(name.startswith("model.") for name in files)
    return {
        name if has_prefix or name == HEAD_NAME else f"model.{name}": (file, name)
        for name, file in files.items()
        if not name.endswith(IGNORED_SUFFIXES)
    }


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_NAME
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, set[str]] = defaultdict(set)
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise TypeError(f"{name} names no file")
            by_file[file].add(name)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise WeightsError(f"{path} is not a safetensors index") from err
    for file, names in by_file.items():
        if "/" in file or "\\" in file or not (folder / file).is_file():
            raise WeightsError(
                f"{folder} lacks the shard {file} that {INDEX_NAME} names",
                hint="Download the checkpoint again.",
            )
        present = set(_list_tensors(folder, file))
        if absent := sorted(names - present):
            raise WeightsError(f"{folder / file} lacks {_listing(absent)}, named by {INDEX_NAME}")
        if unlisted := sorted(present - names):
            raise WeightsError(f"{folder / file} holds {_listing(unlisted)}, not in {INDEX_NAME}")
    return dict(weight_map)


def _no_weights(folder: Path) -> WeightsError:
    names = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt"))
    stray = [name for name in names if name.endswith(".safetensors")]
    if stray:
        return WeightsError(
            f"{folder} has {_listing(stray)} but neither {SINGLE_NAME} nor {INDEX_NAME}",
            hint="Download the checkpoint again.",
        )
    if names:
        return WeightsError(
            f"{folder} has only pickled weights ({_listing(names)}), which are not read",
            hint="Convert them to safetensors.",
        )
    return WeightsError(
        f"{folder} has no weights ({SINGLE_NAME})",
        hint="Download them, or use --load-format dummy for random weights.",
    )


def _open(folder: Path, file: str, device: str = "cpu") -> Any:
    try:
        return safe_open(str(folder / file), framework="pt", device=device)
    except (SafetensorError, OSError, ValueError) as err:
        raise _damaged(folder / file, err) from err


def _damaged(path: Path, err: Exception) -> WeightsError:
    return WeightsError(
        f"{path} is not a complete safetensors file: {err}", hint="Download it again."
    )


def _list_tensors(folder: Path, file: str) -> list[str]:
    with _open(folder, file) as handle:
        return list(handle.keys())


def _match_names(
    targets: dict[str, Target], files: dict[str, tuple[str, str]], folder: Path
) -> None:
    tied = {HEAD_NAME} if HEAD_NAME not in files else set()
    if missing := sorted(targets.keys() - files.keys() - tied):
        raise WeightsError(f"{folder} lacks {_listing(missing)}")
    if extra := sorted(files.keys() - targets.keys()):
        file = files[extra[0]][0]
        raise WeightsError(f"{folder / file} holds {_listing(extra)}, unknown to the architecture")


def _read_all(targets: dict[str, Target], files: dict[str, tuple[str, str]], folder: Path) -> None:
    by_file: dict[str, list[str]] = defaultdict(list)
    for name, (file, _) in files.items():
        by_file[file].append(name)
    share = math.ceil(MAX_READERS / len(by_file))  # readers of one file
    jobs = [(file, names[i::share]) for file, names in by_file.items() for i in range(share)]
    with ThreadPoolExecutor(min(MAX_READERS, len(jobs)), "nvcli-weights") as pool:
        for future in [pool.submit(_read_file, folder, *job, targets, files) for job in jobs]:
            future.result()


def _read_file(
    folder: Path,
    file: str,
    names: list[str],
    targets: dict[str, Target],
    files: dict[str, tuple[str, str]],
) -> None:
    if not names:
        return
    device = str(targets[names[0]].target.device)
    # Inference mode is per thread, and the parameters are inference tensors.
    with torch.inference_mode(), _open(folder, file, device) as handle:
        for name in names:
            part, stored_name = targets[name], files[name][1]
            stored = handle.get_slice(stored_name)
            if part.target.dtype == FP8 and stored.get_dtype() != "F8_E4M3":
                raise WeightsError(
                    f"{folder / file}: {stored_name} is {stored.get_dtype()}, "
                    "the configuration says F8_E4M3"
                )
            if part.target.dtype != FP8 and stored.get_dtype() not in FLOAT_DTYPES:
                raise WeightsError(
                    f"{folder / file}: {stored_name} is {stored.get_dtype()}, "
                    f"only {', '.join(FLOAT_DTYPES)} are supported"
                )
            if list(stored.get_shape()) != list(part.shape):
                raise WeightsError(
                    f"{folder / file}: {stored_name} has shape {list(stored.get_shape())}, "
                    f"the configuration says {list(part.shape)}"
                )
            try:
                if part.is_whole:
                    part.target.copy_(handle.get_tensor(stored_name))
                elif part.rows.count:
                    part.target.copy_(part.cut(stored))
            except (SafetensorError, OSError) as err:
                raise _damaged(folder / file, err) from err


def _check_filled(targets: dict[str, Target], folder: Path) -> None:
    """No NaN anywhere: neither left from birth nor read from the file. One read-back."""
    names = list(targets)
    is_nan = torch.stack([_has_nan(targets[name].target) for name in names])
    bad = [name for name, flag in zip(names, is_nan.tolist(), strict=True) if flag]
    if bad:
        raise WeightsError(f"{folder}: {_listing(bad)} holds values that are not numbers")


def _has_nan(target: torch.Tensor) -> torch.Tensor:
    """[] bool"""
    if target.dtype == FP8:  # which few devices add up
        return (target.view(torch.uint8) & 0x7F).eq(0x7F).any()
    return target.sum(dtype=torch.float32).isnan()


def _after_load(model: CausalLM) -> None:
    for module in model.modules():
        hook = getattr(module, "after_load", None)
        if hook is not None:
            hook()


def _listing(names: list[str]) -> str:
    rest = len(names) - 1
    return names[0] if not rest else f"{names[0]} and {rest} more"
