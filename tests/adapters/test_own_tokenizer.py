"""The tokenizer of a model that another host serves: from the store, a hub's small files, or the same files here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.contract import ModelRefused, silent
from adapters.model_identity import ModelIdentity
from adapters.model_source import resolve
from adapters.model_store import ModelReplaced, ModelStore
from adapters.own_tokenizer import TokenizerRecipe, prepare_own_tokenizer
from adapters.tokenizer import Tokenizer
from tests.adapters.test_hf_hub import environment
from tests.support import tiny_gguf, tiny_models
from tests.support.hub_server import Hub, serving
from tests.support.tiny_gguf import Tiny

MODEL = Tiny("llama", vocabulary=94, words=(*map(chr, range(33, 126)), "xy"))
TEXT = "xyxy!"
# In a process of its own, because the hub's library reads its environment once, when it is imported.
PREPARE = """
import json, sys, time
from pathlib import Path
from adapters.contract import AdapterError
from adapters.model_identity import ModelIdentity
from adapters.model_store import ModelStore
from adapters.own_tokenizer import prepare_own_tokenizer
from adapters.tokenizer import Tokenizer
time.sleep = lambda seconds: None  # the hub's library asks five times, with 23 s between
store, text, *sources = sys.argv[1:]
for source in sources:
    try:
        identity = ModelIdentity(source, "0" * 16)
        found = prepare_own_tokenizer(ModelStore(Path(store)), source, Path(), identity, lambda *_: None)
        print(json.dumps(Tokenizer.load(found).encode(text, special=False)))
    except AdapterError as error:
        print(json.dumps(str(error)))
"""


def serve_far(base: Path, source: str, store: Path) -> ModelIdentity:
    """Prepare a model's tokenizer as its worker does, in a store of its own; returns what the worker says it is."""
    models, file = ModelStore(store), resolve(source, base)
    models.prepare(file, TokenizerRecipe(), silent)
    return ModelIdentity(source, models.digest(file), file.name, file.source)


def encode(source: Path, scratch: Path, text: str) -> list[int]:
    scratch.mkdir()
    TokenizerRecipe().prepare(source, scratch, silent)
    return Tokenizer.load(scratch).encode(text, special=False)


def test_the_same_files_give_the_tokenizer_and_then_the_store_does(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", MODEL)
    identity, store = serve_far(tmp_path, "m.gguf", tmp_path / "far"), ModelStore(tmp_path / "near")
    prepared = prepare_own_tokenizer(store, "m.gguf", tmp_path, identity, silent)
    assert prepared.is_relative_to(store.root)
    assert Tokenizer.load(prepared).encode(TEXT, special=False) == encode(
        tmp_path / "m.gguf", tmp_path / "scratch", TEXT
    )
    (tmp_path / "m.gguf").unlink()
    assert prepare_own_tokenizer(ModelStore(store.root), "m.gguf", tmp_path, identity, silent) == prepared
    (prepared / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelReplaced):
        prepare_own_tokenizer(ModelStore(store.root), "m.gguf", tmp_path, identity, silent)


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", MODEL)
    identity = serve_far(tmp_path, "m.gguf", tmp_path / "far")
    tiny_gguf.write(tmp_path / "m.gguf", Tiny("llama", vocabulary=94, words=MODEL.words[::-1]))
    with pytest.raises(ModelReplaced) as refusal:
        prepare_own_tokenizer(ModelStore(tmp_path / "near"), "m.gguf", tmp_path, identity, silent)
    assert "another one at its place" in refusal.value.why
    with pytest.raises(ModelRefused, match=identity.digest):
        raise refusal.value


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    tiny_gguf.write(tmp_path / "m.gguf", MODEL)
    directory = tiny_models.write_model(tmp_path / "m", "qwen3")
    models = {
        "org/tiny": {path.name: path.read_bytes() for path in directory.iterdir()},
        "org/ggufs": {"q4/m.gguf": (tmp_path / "m.gguf").read_bytes()},
    }
    with serving(Hub(models)) as served:
        yield served


def prepare_from_hub(hub: Hub, directory: Path, *sources: str, **changes: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(directory / "near"), TEXT, *sources],
        env=environment(hub, directory / "home", **changes),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_model_of_the_hub_costs_its_small_files_once(hub: Hub, tmp_path: Path) -> None:
    expected = [encode(tmp_path / name, tmp_path / f"scratch-{name}", TEXT) for name in ("m", "m.gguf")]
    sources = [
        f"hf:org/tiny@{hub.commit('org/tiny')}",
        f"hf:org/ggufs/q4/m.gguf@{hub.commit('org/ggufs')}",
    ]
    assert prepare_from_hub(hub, tmp_path, *sources) == expected
    assert hub.list_ranges("model.safetensors") == []
    assert hub.downloads("m.gguf") == []
    hub.requests.clear()
    assert prepare_from_hub(hub, tmp_path, *sources, HF_HOME=str(tmp_path / "empty")) == expected
    assert hub.requests == []


def test_a_hub_that_does_not_answer_is_named(hub: Hub, tmp_path: Path) -> None:
    source = f"hf:org/tiny@{hub.commit('org/tiny')}"
    (message,) = prepare_from_hub(hub, tmp_path, source, HF_ENDPOINT="http://127.0.0.1:9")
    assert message.startswith(f"{source}: it cannot be downloaded from http://127.0.0.1:9")
