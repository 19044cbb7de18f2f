"""What streams cost the engine's process of `nvcli serve`, and what a GPU would wait for it.

    python -m benchmarks.serve_host --streams 256 --output 768 --step-ms 4.8 --slowness 2.2

No model, no HTTP, no waiting: steps take so long in virtual time, and the host takes the CPU time
of the engine's thread and of the one that sends, `slowness` times. So it matters little what else
the machine does meanwhile, and a host slower than this one can be had. As many prompts run as one
in-process batch and through the loop of the engine's process; all are there when it begins.

Prints a card to standard error; the row goes to `benchmarks/results/` and to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rows import write_row
from benchmarks.serve_load import prompts_of, write_random
from benchmarks.simulated import PREFILL_TOKEN_S, SimulatedRunner, SimulatedTicket
from nvcli.config import EngineConfig
from nvcli.engine import model_runner
from nvcli.engine.engine import Request
from nvcli.engine.step import StepResult
from nvcli.heap import frozen_heap
from nvcli.llm import LLM
from nvcli.server.engine_worker import Worker
from nvcli.server.wire import FrameReader, encode

if TYPE_CHECKING:
    from nvcli.engine.step import StepPlan

MODEL = "qwen3-0.6b"  # its shape: there are no weights
LAUNCH_S = 1e-3  # staging a step, beside what is Python's
GATHER_S = 0.5  # in which all requests reach the engine
BUFFER = 8 << 20


class Clock:
    """Seconds of virtual time. Only the engine's thread moves it."""

    def __init__(self, slowness: float) -> None:
        self.slowness = slowness
        self.now = 0.0
        self.cpu_s = 0.0  # of both threads, since `restart`
        self._sender: int | None = None
        self._last = 0.0

    def restart(self) -> None:
        self.now = self.cpu_s = 0.0
        self._last = self._cpu()

    def tick(self) -> float:
        """The host has worked since the last tick."""
        cpu = self._cpu()
        self.cpu_s += cpu - self._last
        self.now += (cpu - self._last) * self.slowness
        self._last = cpu
        return self.now

    def skip(self) -> None:
        """What was worked since the last tick is the device's."""
        self._last = self._cpu()

    def _cpu(self) -> float:
        if self._sender is None:
            idents = [t.ident for t in threading.enumerate() if t.name == "nvcli-send"]
            self._sender = time.pthread_getcpuclockid(idents[0]) if idents and idents[0] else None
        sender = 0.0 if self._sender is None else time.clock_gettime(self._sender)
        return time.thread_time() + sender


class VirtualRunner(SimulatedRunner):
    clock: Clock

    def restart(self) -> None:
        self.clock.restart()
        self._idle_at = self.idle_s = self._collected = 0.0
        self.host_s: list[float] = []  # from one read step to the next read, without the wait

    def launch(self, plan: StepPlan) -> SimulatedTicket:
        now = self.clock.now = self.clock.tick() + LAUNCH_S
        if self._idle_at:
            self.idle_s += max(0.0, now - self._idle_at)
        num_prompt_tokens = sum(row.n for row in plan.rows if row.n > 1)
        self._idle_at = max(now, self._idle_at) + self.step_s + num_prompt_tokens * PREFILL_TOKEN_S
        ids = [
            (row.seq.seq_id * 31 + row.start) % 97 + 1 if row.samples else -1 for row in plan.rows
        ]
        self.clock.skip()
        return SimulatedTicket(plan, self._idle_at, StepResult(ids))

    def collect(self, ticket: SimulatedTicket) -> StepResult:
        now = self.clock.tick()
        self.host_s.append(now - self._collected)
        self._collected = self.clock.now = max(now, ticket.ready)
        return ticket.result

    def report(self, num_tokens: int) -> dict[str, Any]:
        host = sorted(self.host_s)
        return {
            "tokens_per_s": round(num_tokens / self._idle_at, 1),
            "cpu_us_per_token": round(self.clock.cpu_s / num_tokens * 1e6, 2),
            "idle_ms": round(self.idle_s * 1e3, 1),
            "host_ms": {
                f"p{share}": round(host[min(len(host) - 1, len(host) * share // 100)] * 1e3, 2)
                for share in (50, 90, 99)
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=768)
    parser.add_argument("--step-ms", type=float, default=4.8, help="a decode step of so many rows")
    parser.add_argument("--slowness", type=float, default=2.2, help="1: this machine's host")
    parser.add_argument("--passes", type=int, default=5)
    args = parser.parse_args()

    VirtualRunner.step_s = args.step_ms * 1e-3
    VirtualRunner.clock = Clock(args.slowness)
    model_runner.ModelRunner = VirtualRunner  # type: ignore[misc, assignment]
    folder = tempfile.mkdtemp()
    write_random(Path(folder), MODEL)
    llm = LLM(
        config=EngineConfig(
            model=folder,
            load_format="dummy",
            device="cpu",
            max_model_len=args.input + args.output,
            max_num_seqs=args.streams,
        )
    )
    llm._engine._core.clock = lambda: VirtualRunner.clock.now
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    threading.Thread(target=Worker(theirs, llm).run, daemon=True).start()
    passes = []
    with frozen_heap():
        for number in range(args.passes + 1):
            sides = one_pass(llm, ours, args, seed=2 * number)
            sys.stderr.write(json.dumps(sides) + "\n")
            passes += [sides] if number else []  # the first warms up
    passes.sort(key=lambda sides: float(sides["ratio"]))
    write_row(
        "serve_host",
        metrics={"passes": passes, "median": passes[len(passes) // 2]},
        config={key: value for key, value in vars(args).items() if key != "passes"},
        peer="LLM.generate, same process",
    )
    sys.stdout.flush()
    os._exit(0)  # at the end of the socket the worker would end its process as a failed one


def one_pass(
    llm: LLM, sock: socket.socket, args: argparse.Namespace, *, seed: int
) -> dict[str, Any]:
    runner: Any = llm._runner
    params = llm.sampling(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=args.output, ignore_eos=True
    )
    num_tokens = args.streams * args.output

    def gather() -> None:
        time.sleep(GATHER_S)
        runner.restart()

    llm._thread._post(gather)
    llm.generate(prompts_of(args.streams, args.input, seed), params)
    batch = runner.report(num_tokens)

    llm._thread._post(gather)
    for number, prompt in enumerate(prompts_of(args.streams, args.input, seed + 1)):
        request = Request(request_id=f"{seed}-{number}", prompt_token_ids=prompt, params=params)
        sock.sendall(encode(("submit", (request, None))))
    reader, num_open, num_read, num_pieces = FrameReader(), args.streams, 0, 0
    while num_open:
        for pieces, _, _ in reader.feed(sock.recv(BUFFER)):
            num_pieces += len(pieces)
            num_read += sum(len(packed[3]) for _, packed in pieces)
            num_open -= sum(packed[6] is not None for _, packed in pieces)
    assert num_read == num_tokens, "tokens were lost"
    serve = runner.report(num_tokens) | {"tokens_per_piece": round(num_read / num_pieces, 2)}
    ratio = round(serve["tokens_per_s"] / batch["tokens_per_s"], 4)
    return {"ratio": ratio, "batch": batch, "serve": serve}


if __name__ == "__main__":
    main()
