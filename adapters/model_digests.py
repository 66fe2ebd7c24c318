"""What tells a model's files from all others: profiles are known by it, and not by the model's name."""

from __future__ import annotations

import zlib
from pathlib import Path

from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.vocabulary import SIMULATED_PREFIX

_SIMULATED = f"{SIMULATED_PREFIX}toy"


def digest_at_hand(source: str, base: Path, store: Path, adapter: str = "") -> str:
    """Return the digest of a model's files, which `store` remembers; the simulated one has its script's. `adapter`:
    what is to run it.

    Raises ModelRefused or DownloadFailed.
    """
    if source.startswith(SIMULATED_PREFIX):
        return digest_simulated_model(source)
    return ModelStore(store).digest(resolve(source, base, adapter=adapter))


def digest_simulated_model(source: str) -> str:
    return f"simulated-{zlib.crc32(parse_simulated_script(source).encode()):08x}"


def parse_simulated_script(source: str) -> str:
    """Return the script of a simulated model ("simulated:toy?SCRIPT")."""
    return source.removeprefix(_SIMULATED).removeprefix("?")
