"""Opens the draft store that a target's configuration asks for."""

from __future__ import annotations

from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.config.draft_store import disk_path, is_redis, redis_location
from orchestrator.config.drafts import choose_answer_store
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.draft_store.disk_store import DiskDraftStore
from orchestrator.daemon.draft_store.port import DraftStore
from orchestrator.daemon.draft_store.service import DraftStoreService


def build_draft_store(config: ClusterConfig, base: Path, state: Path, clock: Clock) -> DraftStoreService | None:
    """Return the store of a target's suffix drafter; None where it keeps answers in the worker's memory alone. `base`
    is the configuration's directory, `state` the daemon's. Nothing is connected yet."""
    chosen = choose_answer_store(config.drafts)
    if chosen is None:
        return None
    name, options = chosen
    store: DraftStore
    if is_redis(name):
        from orchestrator.daemon.draft_store.redis_store import RedisDraftStore, RedisPassword  # an extra

        file = base / Path(options.password_file).expanduser() if options.password_file else None
        password = RedisPassword(file, options.password_env)
        store = RedisDraftStore(name, password, options)
        kind, location = "redis", redis_location(name)
    else:
        path = disk_path(name, base, state)
        store = DiskDraftStore(path, options, clock)
        kind, location = "disk", str(path)
    return DraftStoreService(store, kind, location, options, clock)
