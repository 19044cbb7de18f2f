"""Trains the demo model and its draft together for a given time, then evaluates them.

    python -m nvdemo.train --minutes 5.5 --out OUT

OUT receives the weights of both (``main/`` and ``draft/``), the loss curve and the accuracy table.
``--init FOLDER`` starts from weights that are there, with fresh optimizers and a longer warm-up: of
an earlier OUT, or of a model's folder, whose draft is then taken from ``draft``.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from nvdemo import weights
from nvdemo.evaluate import evaluate, table, write
from nvdemo.model import DRAFT, MAIN, Config, DocumentMask, Qwen3, dense_mask, positions_of
from nvdemo.muon import Muon
from nvdemo.packing import LENGTH, ROWS, Feed

_WARM_UP, _WARM_UP_INIT, _DECAY = 0.02, 0.05, 0.55  # shares of the time
_DRAFT = Path(__file__).parents[1] / "draft"
_LOG_EVERY, _SAVE_EVERY = 25, 100.0  # steps, seconds


def head_losses(
    hidden: Tensor, draft_hidden: Tensor, embed: Tensor, draft_embed: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the main model against the text, of the draft against the main model."""
    counted = (target >= 0).float()
    logits = F.linear(hidden, embed).float()
    main = F.cross_entropy(logits, target, ignore_index=-1, reduction="sum") / counted.sum()
    teacher = logits.detach().softmax(-1)
    spread = -(teacher * F.linear(draft_hidden, draft_embed).float().log_softmax(-1)).sum(-1)
    return main, (spread * counted).sum() / counted.sum()


def schedule(progress: float, warm_up: float = _WARM_UP) -> float:
    """Warm up, stay, and fall to nothing over the second half."""
    if progress < warm_up:
        return max(progress / warm_up, 0.01)
    return min(1.0, (1.0 - progress) / _DECAY)


class Trainer:
    def __init__(self, main: Qwen3, draft: Qwen3, device: torch.device, rows: int) -> None:
        self.main, self.draft, self.device = main, draft, device
        named = [*main.named_parameters(), *draft.named_parameters()]
        matrices = [w for name, w in named if w.ndim == 2 and "embed" not in name]
        others = [w for name, w in named if w.ndim == 1 or "embed" in name]
        self.muon = Muon(matrices, lr=0.02)
        self.adam = torch.optim.AdamW(
            others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.head = head_losses
        self.mask = DocumentMask(rows, LENGTH, device)
        if device.type == "cuda":
            for layer in [*main.model.layers, *draft.model.layers]:
                layer.compile(dynamic=False)
            self.head = torch.compile(head_losses, dynamic=False)

    def step(self, block: dict[str, Tensor], scale: float) -> tuple[Tensor, Tensor]:
        tokens, docs, where, target = (
            block[name].long() for name in ("tokens", "docs", "where", "target")
        )
        cuda = self.device.type == "cuda"
        mask = self.mask.of(docs) if cuda else dense_mask(docs)
        positions = positions_of(docs)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
            hidden = self.main(tokens, positions, mask).flatten(0, 1)[where]
            draft_hidden = self.draft(tokens, positions, mask).flatten(0, 1)[where]
            main_loss, draft_loss = self.head(
                hidden,
                draft_hidden,
                self.main.model.embed_tokens.weight,
                self.draft.model.embed_tokens.weight,
                target,
            )
        torch.autograd.backward(main_loss + draft_loss)
        self.muon.step(scale)
        for group in self.adam.param_groups:
            group["lr"] = 3e-3 * scale
        self.adam.step()
        for parameter in [*self.main.parameters(), *self.draft.parameters()]:
            parameter.grad = None
        return main_loss.detach(), draft_loss.detach()


def save(trainer: Trainer, tokenizer: Tokenizer, out: Path) -> None:
    weights.save(trainer.main, tokenizer, out / "main")
    weights.save(trainer.draft, tokenizer, out / "draft")


def train(
    trainer: Trainer,
    feed: Feed,
    tokenizer: Tokenizer,
    minutes: float,
    out: Path,
    warm_up: float = _WARM_UP,
) -> None:
    tokens_a_step = trainer.mask.docs.numel()
    begin = time.monotonic()
    trainer.step(feed.next(), 0.0)  # compiles; a scale of nothing changes nothing
    trainer.step(feed.next(), 0.0)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    begin = saved = time.monotonic()
    with (out / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        curve = csv.writer(file)
        curve.writerow(
            ["step", "seconds", "tokens", "loss", "draft_loss", "scale", "blocks_waiting"]
        )
        step, progress = 0, 0.0
        while progress < 1.0:
            main_loss, draft_loss = trainer.step(feed.next(), schedule(progress, warm_up))
            step += 1
            if step % _LOG_EVERY == 0:
                values = [float(main_loss), float(draft_loss)]  # waits for the device
                seconds = time.monotonic() - begin
                row = [
                    step,
                    round(seconds, 1),
                    step * tokens_a_step,
                    *[round(v, 4) for v in values],
                    round(schedule(progress, warm_up), 4),
                    feed.waiting(),
                ]
                curve.writerow(row)
                file.flush()
                if step % (_LOG_EVERY * 10) == 0 or step == _LOG_EVERY:
                    print(*row, flush=True)
                if time.monotonic() - saved > _SAVE_EVERY:
                    saved = time.monotonic()
                    save(trainer, tokenizer, out)
            progress = (time.monotonic() - begin) / (60 * minutes)
    save(trainer, tokenizer, out)


def start_folders(init: Path | None) -> tuple[Path | None, Path | None]:
    """Where the first weights of the model and of the draft lie; None for weights drawn anew."""
    if init is None:
        return None, None
    if (init / "main").is_dir():
        return init / "main", init / "draft"
    return init, _DRAFT


def build(config: Config, folder: Path | None, device: torch.device) -> Qwen3:
    return weights.load(folder, device) if folder else Qwen3(config).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, required=True, help="time to train, without compiling"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("../nvcli/demo"))
    parser.add_argument("--init", type=Path, help="an earlier OUT or a model to start from")
    parser.add_argument("--seed", type=int, default=1, help="of the text and the first weights")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of 2,048 tokens a step")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument(
        "--count", type=int, default=200, help="questions for each task of the evaluation"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    feed = Feed(args.tokenizer, args.seed, args.workers, args.rows)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    main_folder, draft_folder = start_folders(args.init)
    trainer = Trainer(
        build(MAIN, main_folder, device), build(DRAFT, draft_folder, device), device, args.rows
    )
    feed.start(device)
    warm_up = _WARM_UP_INIT if args.init else _WARM_UP
    train(trainer, feed, tokenizer, args.minutes, args.out, warm_up)
    feed.close()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    begin = time.monotonic()
    rows, examples = evaluate(
        weights.load(args.out / "main", device, dtype),
        weights.load(args.out / "draft", device, dtype),
        tokenizer,
        args.count,
    )
    write(rows, examples, args.out)
    print(f"evaluated in {time.monotonic() - begin:.0f} s\n\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
