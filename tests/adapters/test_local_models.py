"""Models are found in the layouts that other programs keep, as these programs write them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from adapters.local_models import (
    HUGGING_FACE,
    LM_STUDIO,
    OLLAMA,
    LocalModel,
    list_hub_models,
    list_lm_studio_models,
    list_local_models,
    list_models_under,
    list_ollama_models,
)
from tests.support.local_models import write_hub_model, write_ollama_model


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory without any model, and an empty cache of the hub."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def write_file(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def describe(models: list[LocalModel]) -> list[tuple[str, str, int]]:
    return [(model.source, model.name, model.size_bytes) for model in models]


def test_the_hubs_cache_has_files_directories_and_revisions(home: Path) -> None:
    hub = home / "hub"
    write_hub_model(hub, "org/ggufs", {"a-00001-of-00002.gguf": b"12", "a-00002-of-00002.gguf": b"345", "b.gguf": b"6"})
    write_hub_model(hub, "org/whole", {"config.json": b"{}", "model.safetensors": b"1234", "README.md": b"x"})
    write_hub_model(hub, "org/no-weights", {"config.json": b"{}"})
    single = write_hub_model(hub, "org/single", {"s.gguf": b"1"}, listed=False)
    tagged = write_hub_model(hub, "org/tagged", {"q.gguf": b"1"}, ref="v1")
    assert describe(list(list_hub_models())) == [
        ("hf:org/ggufs/a-00001-of-00002.gguf", "org/ggufs/a-00001-of-00002.gguf", 5),
        ("hf:org/ggufs/b.gguf", "org/ggufs/b.gguf", 1),
        (str(single / "s.gguf"), "org/single/s.gguf", 1),
        (f"hf:org/tagged/q.gguf@{tagged.name}", "org/tagged/q.gguf", 1),
        ("hf:org/whole", "org/whole", 4),
    ]


def test_ollamas_names_lead_to_files_that_their_digests_name(home: Path) -> None:
    root = home / "elsewhere"
    small = write_ollama_model(root, "llama3.2:1b", b"small")
    other = write_ollama_model(root, "hf.co/org/model:Q4_K_M", b"other")
    write_ollama_model(root, "someone/tuned:latest", b"gone").unlink()
    write_file(root / "manifests" / "registry.ollama.ai" / "library" / "broken" / "latest", b"{")
    write_file(root / "manifests" / "registry.ollama.ai" / "library" / "odd" / "latest", b"[]")
    models = list(list_ollama_models({"OLLAMA_MODELS": str(root)}))
    assert describe(models) == [
        (str(other), "hf.co/org/model:Q4_K_M", 5),
        (str(small), "llama3.2:1b", 5),
    ]
    assert small.name == f"sha256-{hashlib.sha256(b'small').hexdigest()}"
    assert not list(list_ollama_models({}))
    write_ollama_model(home / ".ollama" / "models", "llama3.2:1b", b"small")
    assert [model.name for model in list_ollama_models({})] == ["llama3.2:1b"]


def test_lm_studios_folder_may_have_been_moved(home: Path) -> None:
    write_file(home / ".lmstudio" / "models" / "org" / "model-GGUF" / "m-Q4_K_M.gguf")
    assert [model.name for model in list_lm_studio_models()] == ["org/model-GGUF/m-Q4_K_M.gguf"]
    moved = write_file(home / "big" / "models" / "org" / "b" / "b.gguf", b"12")
    (home / ".lmstudio-home-pointer").write_text(f"{home / 'big'}\n")
    assert describe(list(list_lm_studio_models()))[0] == (str(moved), "org/b/b.gguf", 2)


def test_a_file_is_listed_once_as_the_first_place_has_it(home: Path) -> None:
    snapshot = write_hub_model(home / "hub", "org/m", {"m.gguf": b"1"})
    write_ollama_model(home / ".ollama" / "models", "m:latest", b"22")
    link = home / ".lmstudio" / "models" / "org" / "m" / "m.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(snapshot / "m.gguf")
    given = write_file(home / "given" / "deep" / "d.gguf")
    models = [model for model in list_local_models([home / "given"], {}) if not model.source.startswith("package:")]
    assert [(model.source, model.place) for model in models] == [
        (str(given), str(home / "given")),
        ("hf:org/m/m.gguf", HUGGING_FACE),
        (str(next((home / ".ollama" / "models" / "blobs").iterdir())), OLLAMA),
    ]
    assert LM_STUDIO not in {model.place for model in models}
    (only,) = list_models_under(given)
    assert (only.name, only.source) == ("d.gguf", str(given))


def test_a_manifest_without_a_model_is_no_model(home: Path) -> None:
    root = home / ".ollama" / "models"
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / "cloud" / "latest"
    write_file(manifest, json.dumps({"layers": [{"mediaType": "x", "digest": "sha256:1"}]}).encode())
    assert not list(list_ollama_models({}))
