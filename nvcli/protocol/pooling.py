"""`/v1/embeddings`, `/rerank` and `/score`: requests, prompts and numbers.

An embedding is the hidden state of the last token, of unit length; a text gets `<|endoftext|>`
behind it, and a query stands behind its task, as Qwen3-Embedding was trained. A relevance is the
probability of "yes" against "no" as the first token of Qwen3-Reranker's answer.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nvcli.engine.embedding import ended
from nvcli.errors import ContextLengthError, InvalidParameterError
from nvcli.protocol.chat import parse_chat
from nvcli.protocol.completions import read_prompts
from nvcli.protocol.fields import Fields, UnsupportedFieldError
from nvcli.protocol.prepare import prepare_chat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from nvcli.protocol.bodies import AnswerHead
    from nvcli.protocol.chat import ChatRequest
    from nvcli.protocol.completions import TokenIds
    from nvcli.text import Tokenizer

MAX_DOCUMENTS = 2048
MIN_DIMENSIONS = 32
TASK = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_HEAD = f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n"
_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    inputs: tuple[str | TokenIds, ...]
    chat: ChatRequest | None = None  # in place of inputs
    model: str | None = None
    as_base64: bool = False
    dimensions: int | None = None
    instruction: str | None = None  # the inputs are queries
    truncate_to: int | None = None  # tokens; -1: what the context holds
    ignored_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRequest:
    """Texts to be judged together: `pairs` of query and document."""

    pairs: tuple[tuple[str, str], ...]
    model: str | None = None
    instruction: str = TASK
    top_n: int | None = None
    returns_documents: bool = False
    truncate_to: int | None = None
    ignored_fields: tuple[str, ...] = ()


def parse_embedding(
    body: object, *, hidden_size: int | None, is_strict: bool = False
) -> EmbeddingRequest:
    """Read a request body; without `hidden_size`, `check_dimensions` has to follow.

    Raises `InvalidParameterError` and `UnsupportedFieldError`.
    """
    fields = Fields(body)
    fields.alone("messages", "input", "content", "prompt")
    fields.alone("input", "content", "prompt")
    fields.alone("content", "prompt")
    chat = None
    inputs: tuple[str | TokenIds, ...] = ()
    if fields.has("messages"):
        chat = parse_chat({"messages": fields.array("messages")})
        if not fields.flag("add_generation_prompt"):
            chat = replace(chat, add_generation_prompt=False)
    else:
        inputs = read_prompts(
            fields,
            "content" if fields.has("content") else "input",
            "inputs",
            no_object="only text can be embedded, this model reads nothing else",
        )
    encoding = fields.choice("encoding_format", ("float", "base64")) or "float"
    dimensions = fields.integer("dimensions", MIN_DIMENSIONS, hidden_size)
    kind = fields.choice("input_type", ("query", "document"))
    instruction = fields.text("instruction")
    if kind == "query":
        instruction = instruction or TASK
    elif kind == "document":
        instruction = None
    fields.ignore(("user", "truncation_side"))
    return EmbeddingRequest(
        inputs=inputs,
        chat=chat,
        model=fields.text("model"),
        as_base64=encoding == "base64",
        dimensions=dimensions,
        instruction=instruction,
        truncate_to=fields.integer("truncate_prompt_tokens", -1),
        ignored_fields=fields.unknown(is_strict=is_strict),
    )


def check_ids(request: EmbeddingRequest, vocab_size: int) -> None:
    """Raises `InvalidParameterError` for a token id that the model does not know."""
    for i, item in enumerate(request.inputs):
        if isinstance(item, tuple) and not all(0 <= token_id < vocab_size for token_id in item):
            place = f"input[{i}]" if len(request.inputs) > 1 else "input"
            raise InvalidParameterError(
                f"{place} holds a token id outside of 0 to {vocab_size - 1}", param=place
            )


def check_dimensions(request: EmbeddingRequest, hidden_size: int) -> None:
    """Raises `InvalidParameterError`."""
    Fields({"dimensions": request.dimensions}).integer("dimensions", MIN_DIMENSIONS, hidden_size)


def embedding_prompts(
    request: EmbeddingRequest, tokenizer: Tokenizer, *, max_model_len: int
) -> list[list[int]]:
    """The token ids of each input. Raises `ContextLengthError`."""
    if request.chat is not None:
        limit = max_model_len if request.truncate_to is None else None
        ids = prepare_chat(request.chat, tokenizer, max_model_len=limit).token_ids
        return [_fit(ended(ids, tokenizer), request.truncate_to, max_model_len, "messages")]
    prompts = []
    for item in request.inputs:
        if isinstance(item, str):
            if request.instruction is not None:
                item = f"Instruct: {request.instruction}\nQuery:{item}"
            ids = ended(tokenizer.encode(item, parse_special=False), tokenizer)
        else:
            ids = list(item)
        prompts.append(_fit(ids, request.truncate_to, max_model_len, "input"))
    return prompts


def _fit(ids: list[int], truncate_to: int | None, limit: int, param: str) -> list[int]:
    """Cut to what was asked for; the last token stays, it is the one that is read."""
    wanted = limit if truncate_to == -1 else truncate_to
    if wanted is not None and len(ids) > wanted > 0:
        ids = [*ids[: wanted - 1], ids[-1]]
    if len(ids) > limit:
        raise ContextLengthError(
            f"the {param} has {len(ids):,} tokens, the context holds {limit:,}",
            hint="Shorten it, or give truncate_prompt_tokens: -1.",
            param=param,
        )
    return ids


def unit_vector(data: bytes, dimensions: int | None = None) -> npt.NDArray[np.float32]:
    """The first `dimensions` numbers of a hidden state, then made to unit length."""
    import numpy as np  # a dry run needs none of it

    vector = np.frombuffer(data, "<f4").astype(np.float64)[:dimensions]
    length = float(np.linalg.norm(vector))
    return (vector / length if length > 0 else vector).astype(np.float32)


def embedding_body(
    request: EmbeddingRequest, pooled: list[bytes], *, model: str, num_tokens: int
) -> dict[str, Any]:
    """OpenAI's list of embeddings; base64 holds little-endian float32."""
    data = []
    for index, state in enumerate(pooled):
        vector = unit_vector(state, request.dimensions)
        value: Any = vector.tolist()
        if request.as_base64:
            value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": value})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


# --- pairs ---------------------------------------------------------------------------------------


def parse_rerank(body: object, *, is_strict: bool, returns_documents: bool) -> PairRequest:
    """Jina's and Cohere's request: one query, many documents."""
    fields = Fields(body)
    query = fields.text("query")
    if not query:
        fields.fail("query", "is missing")
    given = fields.array("documents") or []
    if not 1 <= len(given) <= MAX_DOCUMENTS:
        fields.fail("documents", f"must hold from 1 to {MAX_DOCUMENTS} documents, got {len(given)}")
    documents = [_document(fields, value, i) for i, value in enumerate(given)]
    top_n = fields.integer("top_n", 1)
    wanted = fields.flag("return_documents")
    fields.ignore(("user", "max_chunks_per_doc", "rank_fields"))
    limit = fields.integer("truncate_prompt_tokens", -1)
    if fields.flag("truncation"):
        limit = -1
    return PairRequest(
        pairs=tuple((query, document) for document in documents),
        model=fields.text("model"),
        instruction=fields.text("instruction") or TASK,
        top_n=top_n,
        returns_documents=returns_documents if wanted is None else wanted,
        truncate_to=limit,
        ignored_fields=fields.unknown(is_strict=is_strict),
    )


def _document(fields: Fields, value: Any, index: int) -> str:
    if isinstance(value, str):
        return value
    holder = Fields(value, fields.name(f"documents[{index}]"))
    text = holder.text("text")
    if text is None:
        holder.fail("text", "is missing")
    return text


def parse_score(body: object, *, is_strict: bool) -> PairRequest:
    """vLLM's request: `text_1` against `text_2`, one with many or each with its own."""
    fields = Fields(body)
    fields.alone("queries", "text_1", "text_2")
    fields.alone("text_1", "documents")
    names = ("queries", "documents") if fields.has("queries") else ("text_1", "text_2")
    left, right = (_texts(fields, name) for name in names)
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        fields.fail(names[1], f"holds {len(right)} texts and {names[0]} {len(left)}")
    fields.ignore(("user",))
    return PairRequest(
        pairs=tuple(zip(left, right, strict=True)),
        model=fields.text("model"),
        instruction=fields.text("instruction") or TASK,
        truncate_to=fields.integer("truncate_prompt_tokens", -1),
        ignored_fields=fields.unknown(is_strict=is_strict),
    )


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.get(name)
    texts = (value,) if isinstance(value, str) else fields.texts(name)
    if not texts or len(texts) > MAX_DOCUMENTS:
        fields.fail(name, f"must be text, or from 1 to {MAX_DOCUMENTS} texts")
    return texts


def pair_prompts(
    request: PairRequest, tokenizer: Tokenizer, *, max_model_len: int
) -> list[list[int]]:
    """Qwen3-Reranker's prompt of each pair; what a client wrote cannot open a turn of its own."""
    head, tail = tokenizer.encode(_HEAD), tokenizer.encode(_TAIL)
    prompts = []
    for query, document in request.pairs:
        text = f"<Instruct>: {request.instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = tokenizer.encode(text, parse_special=False)
        room = max_model_len - len(head) - len(tail)
        wanted = room if request.truncate_to == -1 else request.truncate_to
        if wanted is not None:
            ids = ids[:wanted]
        if len(ids) > room:
            size = len(ids) + len(head) + len(tail)
            raise ContextLengthError(
                f"a document with its query has {size:,} tokens, the context holds "
                f"{max_model_len:,}",
                hint="Shorten it, or give truncate_prompt_tokens: -1.",
                param="documents",
            )
        prompts.append([*head, *ids, *tail])
    return prompts


def answer_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """The ids of "no" and "yes". Raises `UnsupportedFieldError` for a model without them."""
    ids = [tokenizer.encode(word, parse_special=False) for word in ("no", "yes")]
    if any(len(each) != 1 for each in ids):
        raise UnsupportedFieldError(
            'this model cannot judge: "yes" and "no" are no single tokens of it', param="model"
        )
    return ids[0][0], ids[1][0]


def relevance(data: bytes) -> float:
    """The share of "yes" in the softmax of the two logits, "no" first."""
    import numpy as np

    no, yes = np.frombuffer(data, "<f4").astype(np.float64)
    return float(1 / (1 + np.exp(np.clip(no - yes, -700, 700))))


def rerank_body(
    request: PairRequest, pooled: list[bytes], *, response_id: str, model: str, num_tokens: int
) -> dict[str, Any]:
    """Results by falling relevance, in the keys of Jina and of Cohere."""
    scores = [relevance(data) for data in pooled]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: request.top_n]
    results: list[dict[str, Any]] = []
    for i in order:
        result: dict[str, Any] = {"index": i, "relevance_score": scores[i]}
        if request.returns_documents:
            result["document"] = {"text": request.pairs[i][1]}
        results.append(result)
    return {
        "id": response_id,
        "object": "rerank",
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": num_tokens}},
    }


def score_body(pooled: list[bytes], head: AnswerHead, *, num_tokens: int) -> dict[str, Any]:
    data = [
        {"index": i, "object": "score", "score": relevance(state)} for i, state in enumerate(pooled)
    ]
    usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    return {**head.json("list"), "data": data, "usage": usage}
