"""Embeddings, rerank and score of tiny random checkpoints, against transformers."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nvcli.llm import LLM
from nvcli.server.config import ServerConfig
from tests.server.conftest import Served
from tests.text import tiny_tokenizer
from tests.tiny import write_tensors, write_tiny_checkpoint

pytestmark = pytest.mark.torch

TEXTS = ["hello you", "The capital of 世界 is ...", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("pooling")
    tensors = write_tiny_checkpoint(folder, vocab=320, tied=True, max_position_embeddings=1024)
    bare = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.")
    }
    original = tiny_tokenizer.MERGE_TEXT
    tiny_tokenizer.MERGE_TEXT = "yes\tno"
    try:
        tiny_tokenizer.write_tokenizer(folder, vocab_size=300)
    finally:
        tiny_tokenizer.MERGE_TEXT = original
    # transformers reads the checkpoint with its prefix, nvcli the bare one that embedders ship
    write_tensors(folder, tensors)
    (folder / "bare").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / "bare" / name).write_bytes((folder / name).read_bytes())
    write_tensors(folder / "bare", bare)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["depth0", "depth1"])
def served(folder: Path, request: Any) -> Iterator[Served]:
    llm = LLM(
        str(folder / "bare"),
        device="cpu",
        dtype="float32",
        num_blocks=512,
        max_num_batched_tokens=32,
        run_ahead=request.param,
    )
    served = Served(llm, ServerConfig(served_model_names=("tiny",)))
    yield served
    served.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hidden_of(reference: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        states = reference.model(torch.tensor([ids])).last_hidden_state[0, -1]
    values: np.ndarray[Any, Any] = states.double().numpy()
    return values


def unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    result: np.ndarray[Any, Any] = vector / np.linalg.norm(vector)
    return result


def embed(served: Served, **fields: Any) -> dict[str, Any]:
    return served.ask("/v1/embeddings", {"model": "tiny", **fields})


def text_ids(served: Served, text: str) -> list[int]:
    tokenizer = served.llm.tokenizer
    return [*tokenizer.encode(text), tokenizer.id_of("<|endoftext|>")]


def test_embeddings_equal_those_of_transformers(served: Served, reference: Any) -> None:
    body = embed(served, input=TEXTS)
    count = 0
    for text, item in zip(TEXTS, body["data"], strict=True):
        ids = text_ids(served, text)
        count += len(ids)
        expected = unit(hidden_of(reference, ids))
        assert np.allclose(item["embedding"], expected, atol=1e-5)
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    again = embed(served, input=TEXTS[::-1])  # now from the prefix cache
    assert np.allclose(
        [item["embedding"] for item in again["data"]][::-1],
        [item["embedding"] for item in body["data"]],
        atol=1e-6,
    )


def test_long_inputs_are_computed_in_chunks(served: Served, reference: Any) -> None:
    text = "hello world " * 20
    item = embed(served, input=text)["data"][0]
    assert np.allclose(
        item["embedding"], unit(hidden_of(reference, text_ids(served, text))), atol=1e-5
    )


def test_dimensions_are_cut_before_the_length_is_made_one(served: Served, reference: Any) -> None:
    item = embed(served, input="hello", dimensions=32)["data"][0]
    expected = unit(hidden_of(reference, text_ids(served, "hello"))[:32])
    assert np.allclose(item["embedding"], expected, atol=1e-5)
    for bad in (31, 65, 0):
        response = served.post("/v1/embeddings", {"model": "tiny", "input": "x", "dimensions": bad})
        assert response.status_code == 400


def test_base64_and_ids(served: Served) -> None:
    ids = text_ids(served, "hello")
    plain = embed(served, input="hello")["data"][0]["embedding"]
    coded = embed(served, input=[ids, ids], encoding_format="base64")["data"]
    for item in coded:
        data = base64.b64decode(item["embedding"])
        assert np.allclose(struct.unpack(f"<{len(data) // 4}f", data), plain, atol=1e-6)


def test_a_query_stands_behind_its_task(served: Served, reference: Any) -> None:
    item = embed(served, input="hi", input_type="query", instruction="Find it")["data"][0]
    ids = text_ids(served, "Instruct: Find it\nQuery:hi")
    assert np.allclose(item["embedding"], unit(hidden_of(reference, ids)), atol=1e-5)


def test_conversations(served: Served) -> None:
    body = embed(served, messages=[{"role": "user", "content": "hi"}])
    assert len(body["data"]) == 1
    media = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    response = served.post("/v1/embeddings", {"model": "tiny", "messages": media})
    assert response.status_code == 400


@pytest.mark.parametrize(
    "value", ["", [], [""], [[]], [[1], "x", 5], 5, [{"image": "x"}], [[310]], [[-1]], ["x"] * 2049]
)
def test_bad_inputs(served: Served, value: Any) -> None:
    response = served.post("/v1/embeddings", {"model": "tiny", "input": value})
    assert response.status_code == 400, response.text
    assert embed(served, input="ok")["data"]


def test_an_input_that_does_not_fit(served: Served) -> None:
    body = {"model": "tiny", "input": "x" * 2000}
    response = served.post("/v1/embeddings", body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert embed(served, input="x" * 2000, truncate_prompt_tokens=-1)["data"]
    messages = [{"role": "user", "content": "x" * 100_000}]
    assert embed(served, input=None, messages=messages, truncate_prompt_tokens=-1)["data"]


def test_the_openai_client_which_asks_for_base64(served: Served) -> None:
    from openai import OpenAI

    # Strict validation knows only lists of numbers, and base64 is what the client asks for itself.
    for is_strict in (False, True):
        client = OpenAI(
            base_url=f"{served.url}/v1", api_key="x", _strict_response_validation=is_strict
        )
        options: Any = {"encoding_format": "float"} if is_strict else {}
        answer = client.embeddings.create(model="tiny", input=TEXTS, **options)
        assert len(answer.data) == 3
        assert abs(np.linalg.norm(answer.data[0].embedding) - 1) < 1e-5
        client.close()


def test_the_python_api(served: Served) -> None:
    (vector,) = served.llm.embed(["hello"])
    assert np.allclose(vector, embed(served, input="hello")["data"][0]["embedding"], atol=1e-6)


# --- rerank --------------------------------------------------------------------------------------


def relevance(served: Served, reference: Any, query: str, document: str, task: str) -> float:
    tokenizer = served.llm.tokenizer
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    with torch.inference_mode():
        logits = reference(torch.tensor([tokenizer.encode(text)])).logits[0, -1]
    (no,), (yes,) = tokenizer.encode("no"), tokenizer.encode("yes")
    return float(torch.softmax(logits[[no, yes]].double(), 0)[1])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(served: Served, reference: Any, path: str) -> None:
    documents: list[Any] = ["red", {"text": "blue"}, "green"]
    body = {"model": "tiny", "query": "sky", "documents": documents, "instruction": "T"}
    results = served.ask(path, body)["results"]
    for result in results:
        document = ("red", "blue", "green")[result["index"]]
        expected = relevance(served, reference, "sky", document, "T")
        assert abs(result["relevance_score"] - expected) < 1e-5
        if path != "/v2/rerank":
            assert result["document"] == {"text": document}
        else:
            assert "document" not in result
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    best = served.post(path, {**body, "top_n": 1}).json()["results"]
    assert [result["index"] for result in best] == [results[0]["index"]]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_score(served: Served, prefix: str) -> None:
    one = served.post(f"{prefix}/score", {"model": "tiny", "text_1": "sky", "text_2": ["a", "b"]})
    assert [item["index"] for item in one.json()["data"]] == [0, 1]
    two = served.post(f"{prefix}/score", {"text_1": ["sky", "sky"], "text_2": ["a", "b"]})
    assert [d["score"] for d in two.json()["data"]] == pytest.approx(
        [d["score"] for d in one.json()["data"]], abs=1e-6
    )
    bad = served.post(f"{prefix}/score", {"text_1": ["a", "b"], "text_2": ["x"] * 3})
    assert bad.status_code == 400


def test_a_document_cannot_open_a_turn(served: Served, reference: Any) -> None:
    plain = served.post("/score", {"text_1": "a", "text_2": "<|im_end|>"}).json()["data"][0]
    turned = relevance(served, reference, "a", "<|im_end|>", "T")
    assert plain["score"] != pytest.approx(turned, abs=1e-9)


@pytest.mark.parametrize(
    "body",
    [
        {"documents": ["a"]},
        {"query": "a"},
        {"query": "a", "documents": []},
        {"query": "a", "documents": [5]},
        {"query": "a", "documents": [{"image": "x"}]},
        {"query": "a", "documents": ["x" * 3000]},
        {"query": "a", "documents": ["x"], "top_n": 0},
    ],
)
def test_bad_pairs(served: Served, body: dict[str, Any]) -> None:
    assert served.post("/rerank", body).status_code == 400
