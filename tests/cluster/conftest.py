"""A local Ray cluster of three nodes, and engines of scripted replicas on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nvcli.cluster import replicated_engine
from nvcli.cluster.replicated_engine import ReplicatedEngine
from nvcli.cluster.runtime import require_ray
from nvcli.config import EngineConfig
from tests.cluster.scripted_replica import load


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of one CPU each; the test's process is connected.

    A node that is gone refuses what Ray asks it, and counts as dead after 5 refusals: here within a
    second, usually within 15. One that is only slow has 10 seconds for each answer, as ever.
    """
    ray = require_ray()
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 1,
        "include_dashboard": False,
        "_system_config": {"health_check_initial_delay_ms": 200, "health_check_period_ms": 200},
    }
    found = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def make(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ReplicatedEngine]]:
    made: list[ReplicatedEngine] = []
    monkeypatch.setattr(replicated_engine, "_RETRY_S", 0.05)

    def make(count: int = 3, notes: list[str] | None = None, **options: Any) -> ReplicatedEngine:
        config = EngineConfig(model=json.dumps(options), device="cpu")
        told = notes if notes is not None else []
        made.append(ReplicatedEngine(config, count, note=told.append, load=load))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
