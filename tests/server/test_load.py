"""Under load: clients that leave at random moments, and bad requests of every kind. Small here; the
full size is `make soak`, with the seed printed.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest

from nvcli.server.config import ServerConfig
from tests.server.conftest import DEFAULTS, Serve, Served
from tests.waiting import PATIENCE_S

CHAT = "/v1/chat/completions"


async def leave_or_stay(served: Served, draw: random.Random, counts: dict[str, int]) -> None:
    """One client: a third of them leave at a random moment."""
    is_streaming = draw.random() < 0.7
    body = {**DEFAULTS, "stream": is_streaming, "n": draw.choice([1, 1, 2])}
    await asyncio.sleep(draw.random() * 0.5)
    patience = draw.random() * 0.3 if draw.random() < 1 / 3 else PATIENCE_S
    async with httpx.AsyncClient(base_url=served.url, timeout=None, trust_env=False) as client:
        try:
            async with asyncio.timeout(patience):
                response = await client.post(CHAT, json=body)
        except TimeoutError:
            counts["left"] += 1
            return
    assert response.status_code in (200, 429), response.text
    counts["stayed" if response.status_code == 200 else "refused"] += 1
    if response.status_code == 200 and is_streaming:
        assert response.text.endswith("data: [DONE]\n\n")


def run_clients(serve: Serve, number: int, seed: int) -> None:
    served = serve("x" * 40, config=ServerConfig(max_queue=10_000), delay_s=0.001)
    draw = random.Random(seed)
    counts = {"left": 0, "stayed": 0, "refused": 0}

    async def run() -> None:
        await asyncio.gather(*(leave_or_stay(served, draw, counts) for _ in range(number)))

    asyncio.run(run())
    print(f"seed {seed}: {counts}")
    served.wait_left()
    text = served.client.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "open_sequences"):
        assert f'nvcli:{name}{{model_name="scripted"}} 0.0' in text
    assert counts["stayed"] > 0


def test_clients_that_leave_leave_nothing_behind(serve: Serve) -> None:
    run_clients(serve, 30, 1)


@pytest.mark.soak
def test_200_clients_of_which_a_third_leave(serve: Serve) -> None:
    for seed in range(5):
        run_clients(serve, 200, seed)


# --- bad requests --------------------------------------------------------------------------------

BAD_FIELDS: list[dict[str, Any]] = [
    {"temperature": "hot"},
    {"top_p": -1},
    {"n": 1000},
    {"messages": None},
    {"messages": [{"role": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": "x" * 3000}]},
    {"tools": [{}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
    {"guided_regex": "(["},
    {"guided_grammar": "start: nowhere"},
    {"stop_token_ids": [10**9]},
    {"logit_bias": {"x": 1}},
    {"model": "other" * 100},
    {"chat_template": "{% for i in range(10**9) %}{% endfor %}"},
]


def bad_request(served: Served, draw: random.Random) -> None:
    kind = draw.random()
    headers = {"content-type": "application/json"}
    path = draw.choice([CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"])
    if kind < 0.3:
        data = draw.randbytes(draw.randrange(200))
    elif kind < 0.4:
        data = b'{"a":' * draw.randrange(2000)
    elif kind < 0.5:
        data, headers = b"{}", {"content-type": "text/plain"}
    else:
        fields = draw.choice(BAD_FIELDS)
        data = json.dumps({**DEFAULTS, "max_tokens": 2, **fields}).encode()
        path = CHAT
    response = served.client.post(path, content=data, headers=headers)
    assert 400 <= response.status_code < 500, (path, data[:200], response.text)
    assert isinstance(response.json()["error"], dict)
    assert len(response.content) < 8192


def run_bad_requests(serve: Serve, number: int, seed: int) -> None:
    served = serve("Hello!")
    draw = random.Random(seed)
    for _ in range(number // 5):  # caches fill up
        bad_request(served, draw)
    before = memory_kib()
    for _ in range(number):
        bad_request(served, draw)
    grown = memory_kib() - before
    print(f"seed {seed}: {number} requests, {grown:+} KiB")
    assert served.chat()["choices"][0]["message"]["content"] == "Hello!"
    assert grown < 20_000
    served.wait_idle()


def memory_kib() -> int:
    status = Path("/proc/self/statm")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.read_text().split()[1]) * resource.getpagesize() // 1024


def test_bad_requests_cost_nothing(serve: Serve) -> None:
    run_bad_requests(serve, 300, 1)


@pytest.mark.soak
def test_10_000_bad_requests(serve: Serve) -> None:
    run_bad_requests(serve, 10_000, 2)
