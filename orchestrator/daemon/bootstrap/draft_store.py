"""Opens the draft store that a target's configuration asks for."""

from __future__ import annotations

from pathlib import Path

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.config.draft_store import disk_path, is_redis, redis_location
from orchestrator.config.drafts import choose_answer_store
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.draft_store.disk_store import DiskDraftStore
from orchestrator.daemon.draft_store.port import DraftStore, StoreBounds
from orchestrator.daemon.draft_store.service import DraftStoreService, StoreTerms


def build_draft_store(config: ClusterConfig, base: Path, state: Path, clock: Clock) -> DraftStoreService | None:
    """Return the store of a target's suffix drafter; None where it keeps answers in the worker's memory alone. `base`
    is the configuration's directory, `state` the daemon's. Nothing is connected yet."""
    chosen = choose_answer_store(config.drafts)
    if chosen is None:
        return None
    name, options = chosen
    bounds = StoreBounds(options.max_entries, int(options.max_size), options.expire_s)
    store: DraftStore
    if is_redis(name):
        from orchestrator.daemon.draft_store.redis_store import RedisDraftStore, RedisPassword  # an extra

        file = base / Path(options.password_file).expanduser() if options.password_file else None
        password = RedisPassword(file, options.password_env)
        store = RedisDraftStore(name, password, bounds, options.timeout_ms / MS_PER_S)
        kind, location = "redis", redis_location(name)
    else:
        path = disk_path(name, base, state)
        store = DiskDraftStore(path, bounds, clock)
        kind, location = "disk", str(path)
    terms = StoreTerms(kind, location, options.shared, options.wait_ms / MS_PER_S)
    return DraftStoreService(store, terms, clock)
