"""How long a user waits: `--help`, `--version`, and `nvcli chat` to its prompt.

    python -m benchmarks.startup [MODEL]

Each is timed as a whole process, the median of `--repeat` after one warm-up; `to_prompt_s` is the
time until the chat has loaded the model and shows its prompt in a pseudo-terminal. Also reports the
KV pool against the share of memory that was asked for.
"""

from __future__ import annotations

import argparse
import os
import pty
import select
import signal
import statistics
import subprocess
import sys
import time

from benchmarks.rows import write_row

NVCLI = [sys.executable, "-m", "nvcli"]
PROMPT = b">>>"


def time_command(*args: str, repeat: int) -> float:
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        subprocess.run([*NVCLI, *args], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def time_to_prompt(model: str, *, limit_s: float = 120) -> float:
    """Seconds from starting `nvcli chat` until its prompt is on the terminal."""
    start = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(NVCLI[0], [*NVCLI, "chat", "-m", model, "--no-history"])
    seen = b""
    try:
        while PROMPT not in seen:
            left = limit_s - (time.perf_counter() - start)
            if left <= 0 or not select.select([terminal], [], [], left)[0]:
                raise TimeoutError(f"no prompt after {limit_s} s: {seen[-300:]!r}")
            seen += os.read(terminal, 65536)
        return time.perf_counter() - start
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        os.close(terminal)


def pool_of(model: str, device: str) -> dict[str, object]:
    """Bytes of weights and KV pool, and what they are of the memory the share is taken from."""
    import torch

    from nvcli import LLM
    from nvcli.engine.kv_cache import DEFAULT_SHARE, available_memory

    is_cuda = device == "cuda"
    total = torch.cuda.mem_get_info()[1] if is_cuda else available_memory()
    with LLM(model, device=device, load_format="auto" if _has_weights(model) else "dummy") as llm:
        pool, weights = llm.startup.pool_bytes, llm.startup.weights_bytes
        used = total - torch.cuda.mem_get_info()[0] if is_cuda else pool + weights
        report = {"num_blocks": llm.startup.num_blocks, "max_model_len": llm.max_model_len}
        dtype = llm.startup.weights_dtype
    return {
        **report,
        "memory_bytes": total,
        "share": DEFAULT_SHARE[device],
        "weights_dtype": dtype,
        "weights_bytes": weights,
        "pool_bytes": pool,
        "used_share": round(used / total, 4),
    }


def _has_weights(model: str) -> bool:
    from nvcli.models.resolve import resolve_model

    return any(resolve_model(model).glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--pool-only", action="store_true", help="only the KV pool")
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    metrics: dict[str, object] = {"kv_pool": pool_of(args.model, args.device)}
    if not args.pool_only:
        metrics["help_s"] = round(time_command("--help", repeat=args.repeat), 3)
        metrics["chat_help_s"] = round(time_command("chat", "--help", repeat=args.repeat), 3)
        metrics["version_s"] = round(time_command("--version", repeat=args.repeat), 3)
        to_prompt = statistics.median(time_to_prompt(args.model) for _ in range(3))
        metrics["to_prompt_s"] = round(to_prompt, 2)
    write_row(
        "startup",
        metrics=metrics,
        config={"model": args.model.rstrip("/").rsplit("/", 1)[-1], "device": args.device},
    )


if __name__ == "__main__":
    main()
