"""Writes models as other programs keep them: the cache of the hub's library, and Ollama's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache


def write_hub_model(
    cache: Path, repo: str, files: Mapping[str, bytes], ref: str = "main", *, listed: bool = True
) -> Path:
    """Put a model into a cache of the hub's library, as that lays it out: blobs by their digests, and a snapshot of
    links to them; where all of it was fetched (`listed`) also the list of its files. Return the snapshot."""
    root = cache / f"models--{repo.replace('/', '--')}"
    commit = hashlib.sha1(repo.encode(), usedforsecurity=False).hexdigest()
    snapshot = root / "snapshots" / commit
    for name, content in files.items():
        blob = root / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (root / "refs").mkdir()
    (root / "refs" / ref).write_text(commit)
    if listed:
        entries = {name: TreeCacheEntry(size=len(content), blob_id=commit) for name, content in files.items()}
        write_tree_cache(str(root), commit, entries)
    return snapshot


def write_ollama_model(root: Path, name: str, content: bytes) -> Path:
    """Put a model into Ollama's folder `root` under a name as `ollama list` has it. Return its file."""
    path, _, tag = name.rpartition(":")
    parts = path.split("/")
    places = [*["registry.ollama.ai", "library"][: max(0, 3 - len(parts))], *parts]
    digest = hashlib.sha256(content).hexdigest()
    blob = root / "blobs" / f"sha256-{digest}"
    manifest = root.joinpath("manifests", *places, tag)
    for file in (blob, manifest):
        file.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00", "size": 2},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(content)},
    ]
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    manifest.write_text(json.dumps({"schemaVersion": 2, "mediaType": kind, "layers": layers}))
    return blob
