"""Makes a store of the answers that a draft store on disk has kept: what clients were told is drafted from as documents
are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.clock import Clock
from orchestrator.config.draft_store import DraftStoreOptions, disk_path, is_redis
from orchestrator.config.drafts import choose_answer_store
from orchestrator.config.load import state_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.draft_store.codec import DamagedValue, decode_answer
from orchestrator.daemon.draft_store.disk_store import read_values
from orchestrator.daemon.draft_store.port import StoreFailed
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options
from orchestrator.generating.document_index import find_target, load_store_tokenizer, write_store
from orchestrator.protocol.packed_tokens import unpack_tokens
from orchestrator.worker.loading.prepared import OnProgress


@dataclass(frozen=True, slots=True)
class LearnJob:
    """What to learn from. `output`: the store. An answer with a match of one of the `redact` expressions is left out.
    `all_keys`: answers to one API key may help all."""

    output: Path
    config: Path | None = None
    model: str = ""
    redact: Sequence[str] = ()
    all_keys: bool = False
    max_tokens: int = 50_000_000


def index_answers(job: LearnJob, clock: Clock, progress: OnProgress) -> dict[str, Any]:
    """Write the store and return what is in it; the newest answers stay where there are too many. Raises ConfigError,
    and what preparing the model's tokenizer raises."""
    config, path = find_target(job.config, job.model)
    store, kept = _find_store(config, path, all_keys=job.all_keys)
    try:
        patterns = [re.compile(pattern) for pattern in job.redact]
    except re.error as error:
        raise ConfigError(f"--redact {error.pattern!r}: is no regular expression: {error}") from error
    options = engine_options(config, path.resolve().parent).model
    tokenizer = load_store_tokenizer(options, progress)
    try:
        values = read_values(store, clock.wall_s() - kept.expire_s)
    except StoreFailed as error:
        raise ConfigError(f"{error}; serve some requests with `store: disk` first") from error
    documents: list[list[int]] = []
    damaged = redacted = count = 0
    for number, value in enumerate(reversed(values)):
        progress("reading answers", number / len(values))
        try:
            tokens = list(unpack_tokens(decode_answer(value)))
        except DamagedValue:
            damaged += 1
            continue
        if patterns and any(pattern.search(tokenizer.decode(tokens)) for pattern in patterns):
            redacted += 1
            continue
        count += len(tokens) + 1
        if count > job.max_tokens:
            break
        documents.append(tokens)
    if not documents:
        raise ConfigError(f"{store}: has no answer to learn from ({redacted} left out by --redact, {damaged} damaged)")
    facts = write_store(job.output, documents[::-1], options, str(store), progress)
    return facts | {"answers": len(values), "redacted": redacted, "damaged": damaged}


def _find_store(config: ClusterConfig, path: Path, *, all_keys: bool) -> tuple[Path, DraftStoreOptions]:
    """Return the file that answers are kept in. Raises ConfigError."""
    chosen = choose_answer_store(config.drafts)
    if chosen is None or is_redis(chosen[0]):
        raise ConfigError(f"{path}: no draft keeps answers on disk; add `drafts: [{{method: suffix, store: disk}}]`")
    name, options = chosen
    if not (options.shared or all_keys):
        raise ConfigError(
            f"{path}: answers help the API key that they were given to (store_options.shared: false), and a store of "
            "them helps all; say --all-keys if that may be"
        )
    return disk_path(name, path.resolve().parent, state_directory(config, path)), options
