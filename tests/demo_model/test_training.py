"""Packing, masks and one step of training, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nvdemo.chat import one
from nvdemo.decode import greedy
from nvdemo.model import DRAFT, MAIN, Config, DocumentMask, Qwen3, dense_mask, positions_of
from nvdemo.packing import LENGTH, blocks, encode_samples
from nvdemo.train import Trainer, build, schedule, start_folders
from tokenizers import Tokenizer

pytestmark = pytest.mark.torch
TINY = Config(hidden=32, layers=1, heads=2, kv_heads=1, ffn=32, head_dim=16)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(__file__).parents[2] / "nvcli" / "demo" / "tokenizer.json"))


def test_block_holds_whole_samples_with_their_targets(tokenizer: Tokenizer) -> None:
    block = next(blocks(tokenizer, 1, 0, 1, rows=2))
    known = {tuple(ids[:-1]): ids[prompt:] for ids, prompt in encode_samples(tokenizer, 1, 0, 512)}
    target = block["target"][block["target"] >= 0]
    where = block["where"][: len(target)]
    found = 0
    for row in range(2):
        for number in np.unique(block["docs"][row]):
            inside = np.flatnonzero(block["docs"][row] == number)
            answer = known.get(tuple(block["tokens"][row, inside].tolist()))
            if answer is None:  # the padding at the end of the row
                continue
            places = where[
                (where >= row * LENGTH + inside[0]) & (where <= row * LENGTH + inside[-1])
            ]
            got = target[np.isin(where, places)].tolist()
            assert got == answer[: len(got)]  # a small block may lack room for its last losses
            found += got == answer
    assert found > 10


def test_block_mask_equals_dense_mask() -> None:
    torch.manual_seed(0)
    docs = torch.randint(0, 6, (2, 384)).sort(dim=1).values
    mask = DocumentMask(2, 384, torch.device("cpu")).of(docs)
    place = torch.arange(384)
    allowed = dense_mask(docs)[:, 0]
    coarse = mask.to_dense()[:, 0].bool().repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert not (allowed & ~coarse).any()  # no block is missing
    assert positions_of(docs)[0, 0] == 0
    starts = torch.ones_like(docs, dtype=torch.bool)
    starts[:, 1:] = docs[:, 1:] != docs[:, :-1]
    assert (positions_of(docs)[starts] == 0).all()
    assert (place >= positions_of(docs)).all()


def test_a_few_steps_lower_the_loss(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    trainer = Trainer(Qwen3(TINY), Qwen3(TINY), torch.device("cpu"), rows=1)
    arrays = next(blocks(tokenizer, 1, 0, 1, rows=1))
    block = {name: torch.from_numpy(array) for name, array in arrays.items()}
    block["where"], block["target"] = block["where"][:300], block["target"][:300]
    losses = [float(trainer.step(block, 1.0)[0]) for _ in range(6)]
    assert losses[-1] < losses[0] - 0.3


def test_training_starts_from_the_shipped_weights(tokenizer: Tokenizer) -> None:
    package = Path(__file__).parents[2] / "nvcli" / "demo"
    cpu = torch.device("cpu")
    main, draft = start_folders(package)
    question = one("capital", "What is the capital of France?", "", "")
    ids = tokenizer.encode(question.prompt(), add_special_tokens=False).ids
    for model in (build(MAIN, main, cpu), build(DRAFT, draft, cpu)):
        answer = greedy(model, [ids], 12, stop=tokenizer.token_to_id("<|im_end|>"))[0]
        assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_start_folders_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    assert start_folders(tmp_path) == (tmp_path / "main", tmp_path / "draft")
    assert start_folders(None) == (None, None)


def test_schedule_rises_stays_and_falls() -> None:
    assert schedule(0.0) < schedule(0.01) < schedule(0.2) == 1.0
    assert schedule(0.9) < 0.3
    assert schedule(1.0) == 0.0
    assert schedule(0.03, warm_up=0.05) < 1.0 == schedule(0.06, warm_up=0.05)


def test_model_and_decoding_equal_transformers() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3(DRAFT)
    reference = Qwen3ForCausalLM(Qwen3Config(**DRAFT.as_json(eos=2, pad=0))).float().eval()
    reference.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.randint(0, 4096, (2, 40))
    mask = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    with torch.inference_mode():
        mine = model.logits(model(tokens, torch.arange(40).expand(2, 40), mask))
        torch.testing.assert_close(mine, reference(tokens).logits, rtol=1e-4, atol=1e-4)
    prompts = [tokens[0, :9].tolist(), tokens[1, :30].tolist()]
    for prompt, answer in zip(prompts, greedy(model, prompts, 12, stop=-1), strict=True):
        wanted = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert answer == wanted[0, len(prompt) :].tolist()
