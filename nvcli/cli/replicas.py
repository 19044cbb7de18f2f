"""What `--replicas` loads in place of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.cluster.replicated_engine import ReplicatedEngine
    from nvcli.config import EngineConfig


def replicas_loader(
    config: EngineConfig, num_replicas: int, address: str | None, note: Callable[[str], None]
) -> Callable[[], ReplicatedEngine]:
    """Raises `UsageError` at once where Ray is not installed; what `ReplicatedEngine` raises comes
    when it is called."""
    from nvcli.cluster.runtime import require_ray

    require_ray()

    def load() -> ReplicatedEngine:
        from nvcli.cluster.replicated_engine import ReplicatedEngine

        return ReplicatedEngine(config, num_replicas, address=address, note=note)

    return load
