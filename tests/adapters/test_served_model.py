"""What stands for a model's files once these are replaced: the head that the store keeps, and what was prepared."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from adapters.contract import ModelRefused
from adapters.decoder.source import open_source
from adapters.model_identity import ModelIdentity
from adapters.model_source import ModelSource, resolve
from adapters.model_store import ModelReplaced, ModelStore
from adapters.served_model import find_served, keep_head
from adapters.tokenizer_recipe import TokenizerRecipe
from adapters.vocabulary import vocabulary_in
from tests.support import tiny_gguf, tiny_models
from tests.support.tiny_gguf import Tiny

MODEL = Tiny("llama", vocabulary=94, words=(*map(chr, range(33, 126)), "xy"))


@dataclass
class Said:
    """A Progress that keeps what it was told, and how often a file was read to its end."""

    stages: list[str] = field(default_factory=list)
    read: int = 0

    def __call__(self, stage: str, fraction: float) -> None:
        self.stages.append(stage)
        self.read += stage.startswith("reading ") and fraction == 1.0 and "vocabulary" not in stage


@dataclass(frozen=True)
class Served:
    """A model in a store, as it was loaded first."""

    base: Path
    store: Path
    file: ModelSource
    identity: ModelIdentity

    def find(self, said: Said | None = None) -> ModelSource:
        return find_served(ModelStore(self.store), self.identity, self.base, said or Said())


def serve(base: Path, store: Path, source: str) -> Served:
    """Load a model as the first worker does, with its tokenizer standing for its weights."""
    models, said = ModelStore(store), Said()
    file = resolve(source, base)
    models.prepare(file, TokenizerRecipe(), said)
    keep_head(models, file, said)
    assert said.read == len(file.content), "no byte is read twice"
    return Served(base, store, file, ModelIdentity(source, models.digest(file), file.name, file.source))


@pytest.fixture(params=["gguf", "directory"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Served:
    if request.param == "gguf":
        tiny_gguf.write(tmp_path / "model", MODEL)
    else:
        tiny_models.write_model(tmp_path / "model", "llama", shards=2)
    return serve(tmp_path, tmp_path / "store", "model")


def swap(served: Served) -> None:
    """Put another model at its place."""
    path = served.base / "model"
    if path.is_dir():
        shutil.rmtree(path)
        tiny_models.write_model(path, "llama", num_hidden_layers=3)
    else:
        path.unlink()
        tiny_gguf.write(path, replace(MODEL, layers=3))


def remove(served: Served) -> None:
    path = served.base / "model"
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def cut(served: Served) -> None:
    path = max(served.file.content, key=lambda one: one.stat().st_size)
    path.write_bytes(path.read_bytes()[:200])


HARMS = [swap, remove, cut]


def test_what_is_at_its_place_serves_where_it_is_the_same(served: Served) -> None:
    assert served.find() == served.file
    moved = served.base / "moved"
    (served.base / "model").rename(moved)
    moved.rename(served.base / "model")
    said = Said()
    served.find(said)
    for file in served.file.content:
        file.touch()
    found = served.find(said)
    assert said.read == 0, "the head says all that is needed"
    assert ModelStore(served.store).prepare(found, TokenizerRecipe(), said).is_dir()
    (prepared,) = served.store.glob(f"{served.identity.digest}/tokenizer-*/")
    shutil.rmtree(prepared)
    assert ModelStore(served.store).prepare(found, TokenizerRecipe(), said) == prepared
    assert said.read >= len(served.file.content), "it was compared before it was prepared from"


@pytest.mark.parametrize("harm", HARMS)
def test_the_head_stands_for_files_that_were_replaced(served: Served, harm: Callable[[Served], None]) -> None:
    before = open_source(served.file.path)
    spec, vocabulary = before.spec, vocabulary_in(served.file)
    sizes = [file.stat().st_size for file in served.file.content]
    harm(served)
    said = Said()
    found = served.find(said)
    assert (found.name, found.digest[:16]) == (served.file.name, served.identity.digest)
    assert [file.stat().st_size for file in found.content] == sizes
    assert [file.name for file in found.content] == [file.name for file in served.file.content]
    assert (open_source(found.path).spec, vocabulary_in(found)) == (spec, vocabulary)
    store = ModelStore(served.store)
    (prepared,) = served.store.glob(f"{served.identity.digest}/tokenizer-*/")
    assert store.prepare(found, TokenizerRecipe(), said) == prepared
    assert store.find(found, TokenizerRecipe()) == prepared
    assert store.digest(found) == served.identity.digest
    assert said.read == 0


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("emptied", ["store", "prepared"])
def test_what_is_nowhere_is_refused_with_what_it_was_what_it_is_and_the_way_out(
    served: Served, harm: Callable[[Served], None], emptied: str
) -> None:
    harm(served)
    if emptied == "store":
        shutil.rmtree(served.store)
    else:
        for prepared in served.store.glob("*/tokenizer-*/"):
            shutil.rmtree(prepared)
    with pytest.raises(ModelReplaced) as refusal:
        ModelStore(served.store).prepare(served.find(), TokenizerRecipe(), Said())
    text = str(refusal.value)
    assert text.startswith("model: ")
    assert "\n" not in text
    for told in (served.identity.digest, str(served.store), "at its place", "`outrider reload`"):
        assert told in text
    if harm is remove:
        assert "there is no " in text


def test_a_damaged_head_is_none(served: Served) -> None:
    (head,) = served.store.glob("*/head-*/files/")
    file = max(head.iterdir(), key=lambda one: one.stat().st_size)
    file.write_bytes(b"\0" + file.read_bytes()[1:])
    remove(served)
    with pytest.raises(ModelReplaced):
        served.find()


def test_a_store_that_takes_nothing_costs_only_what_comes_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_gguf.write(tmp_path / "model", MODEL)
    file = resolve("model", tmp_path)
    keep_head(ModelStore(tmp_path / "store", disk_free=lambda _: 0), file, Said())
    assert "cannot be loaded again once its files are replaced" in caplog.text
    (tmp_path / "model").write_bytes(b"GGUF")
    with pytest.raises(ModelRefused, match=r"changed|truncated|damaged"):
        keep_head(ModelStore(tmp_path / "store"), file, Said())


def test_a_writer_that_sets_the_date_back_is_noticed(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "model", MODEL)
    tiny_gguf.write(tmp_path / "other", replace(MODEL, seed=6))
    file = resolve("model", tmp_path)
    before, status = ModelStore(tmp_path / "store").digest(file), file.path.stat()
    with file.path.open("r+b") as stream:
        stream.write((tmp_path / "other").read_bytes())
    os.utime(file.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.path.stat().st_size, file.path.stat().st_ino) == (status.st_size, status.st_ino)
    assert ModelStore(tmp_path / "store").digest(file) != before
