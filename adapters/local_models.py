"""Models on this machine: in the Hugging Face cache, in the folders of Ollama and LM Studio, under given paths, and in
installed packages. Names and sizes are read, and no model's content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from adapters.decoder.hf_config import CONFIG_FILE
from adapters.gguf_splits import list_beside, list_first_files
from adapters.hf_hub import HUB_PREFIX, is_listed
from adapters.model_source import INSTALL_COMMANDS, PACKAGE_PREFIX, list_package_roots

HUGGING_FACE: Final = "the Hugging Face cache"
OLLAMA: Final = "Ollama"
LM_STUDIO: Final = "LM Studio"
PACKAGE: Final = "an installed package"

_WEIGHTS: Final = (".safetensors", ".bin", ".onnx.data")
_OLLAMA_HOMES: Final = ("~/.ollama/models", "/usr/share/ollama/.ollama/models", "/var/lib/ollama/models")
"""A user's own, and those of its services on Linux."""
_OLLAMA_MODEL: Final = "application/vnd.ollama.image.model"
_OLLAMA_DEFAULTS: Final = ("registry.ollama.ai", "library")
"""The registry and the namespace that Ollama leaves out of a model's name."""
_LM_STUDIO_HOMES: Final = ("~/.lmstudio", "~/.cache/lm-studio")
_LM_STUDIO_POINTER: Final = "~/.lmstudio-home-pointer"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that is here. `source`: as model.source of cluster.yaml takes it; `place`: whose it is, in words; `name`:
    what it is called there; `path`: its file, the first of several, or its directory; `size_bytes`: of its weights."""

    source: str
    place: str
    name: str
    path: Path
    size_bytes: int


def list_local_models(paths: Iterable[Path] = (), environment: Mapping[str, str] = os.environ) -> list[LocalModel]:
    """Return the models under `paths`, and those of the usual places, each file once: as the first place has it."""
    models: dict[Path, LocalModel] = {}
    for model in (
        *(model for path in paths for model in list_models_under(path)),
        *list_hub_models(),
        *list_ollama_models(environment),
        *list_lm_studio_models(),
        *list_package_models(),
    ):
        models.setdefault(model.path.resolve(), model)
    return list(models.values())


def list_models_under(root: Path, place: str = "") -> Iterator[LocalModel]:
    """Yield the GGUF files of a path and the directories with safetensors, by their absolute paths. `place`: "" for the
    path itself."""
    root, place = root.expanduser().absolute(), place or str(root)
    if root.is_file():
        yield LocalModel(str(root), place, root.name, root, _sum_bytes(list_beside(root)))
        return
    for folder, directories, names in os.walk(root):
        directories.sort()
        directory = Path(folder)
        for name in list_first_files(names):
            path = directory / name
            yield LocalModel(str(path), place, str(path.relative_to(root)), path, _sum_bytes(list_beside(path)))
        if _holds_weights(names):
            name = str(directory.relative_to(root)) if directory != root else root.name
            yield LocalModel(str(directory), place, name, directory, _sum_weights(directory / name for name in names))


def list_hub_models() -> Iterator[LocalModel]:
    """Yield the models of the hub's cache that have weights there: the newest revision of each. One of which the cache
    does not list all files, as where single ones were fetched, is named by its path: the hub may be away."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repository in sorted(cache.repos, key=lambda repository: repository.repo_id):
        if repository.repo_type != "model" or "/" not in repository.repo_id:
            continue
        newest = max(repository.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
        root = newest.snapshot_path
        revision = "" if "main" in newest.refs else f"@{newest.commit_hash}"
        listed = is_listed(repository.repo_id, newest.commit_hash)
        root_source = f"{HUB_PREFIX}{repository.repo_id}" if listed else str(root)
        revision = revision if listed else ""
        names = {file.file_path.relative_to(root).as_posix() for file in newest.files}
        for name in list_first_files(names):
            path, whole = root / name, f"{repository.repo_id}/{name}"
            yield LocalModel(
                f"{root_source}/{name}{revision}", HUGGING_FACE, whole, path, _sum_bytes(list_beside(path))
            )
        if _holds_weights(names):
            size = _sum_weights(root / name for name in names if "/" not in name)
            yield LocalModel(f"{root_source}{revision}", HUGGING_FACE, repository.repo_id, root, size)


def list_ollama_models(environment: Mapping[str, str] = os.environ) -> Iterator[LocalModel]:
    """Yield the models that Ollama keeps: a manifest for each name leads to a GGUF file that its digest names."""
    given = environment.get("OLLAMA_MODELS", "")
    for home in (given,) if given else _OLLAMA_HOMES:
        root = Path(home).expanduser()
        with suppress(OSError):  # a service's folder, which is not ours to read
            for manifest in sorted((root / "manifests").glob("*/*/*/*")):
                layer = _find_model_layer(manifest)
                blob = root / "blobs" / str(layer.get("digest", "")).replace(":", "-")
                if layer and blob.is_file():
                    yield LocalModel(str(blob), OLLAMA, _name_ollama(manifest), blob, blob.stat().st_size)


def list_lm_studio_models() -> Iterator[LocalModel]:
    """Yield the models of LM Studio: GGUF files and directories under PUBLISHER/MODEL."""
    homes = [Path(home).expanduser() for home in _LM_STUDIO_HOMES]
    with suppress(OSError):  # only where it was moved
        homes.insert(0, Path(Path(_LM_STUDIO_POINTER).expanduser().read_text(encoding="utf-8").strip()))
    for home in dict.fromkeys(homes):
        yield from list_models_under(home / "models", LM_STUDIO)


def list_package_models() -> Iterator[LocalModel]:
    """Yield the models that installed packages carry which are known for it."""
    for module in INSTALL_COMMANDS:
        for root in list_package_roots(module):
            for name in list_first_files(path.name for path in root.glob("*.gguf")):
                path = root / name
                yield LocalModel(f"{PACKAGE_PREFIX}{module}/{name}", PACKAGE, name, path, path.stat().st_size)


def _holds_weights(names: Iterable[str]) -> bool:
    """Return whether a directory of these files is a model that model.source takes as one."""
    names = set(names)
    return CONFIG_FILE in names and any(name.endswith(".safetensors") for name in names)


def _find_model_layer(manifest: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, AttributeError):
        layers = json.loads(manifest.read_text(encoding="utf-8")).get("layers") or []
        return next((layer for layer in layers if layer.get("mediaType") == _OLLAMA_MODEL), {})
    return {}


def _name_ollama(manifest: Path) -> str:
    """Return what Ollama calls the model of a manifest, REGISTRY/NAMESPACE/NAME/TAG."""
    registry, namespace, name, tag = manifest.parts[-4:]
    before = [registry, namespace] if registry != _OLLAMA_DEFAULTS[0] else [namespace]
    return "/".join([*(before if namespace != _OLLAMA_DEFAULTS[1] else []), f"{name}:{tag}"])


def _sum_weights(paths: Iterable[Path]) -> int:
    return _sum_bytes(path for path in paths if path.name.endswith(_WEIGHTS))


def _sum_bytes(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with suppress(OSError):  # a link of the cache that leads nowhere
            total += path.stat().st_size
    return total
