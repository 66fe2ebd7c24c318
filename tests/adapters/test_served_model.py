"""What stands for a model's files once these are replaced: the head that the store keeps, and what was prepared."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from adapters.contract import LoadOptions, ModelRefused
from adapters.decoder.source import open_source
from adapters.decoder.spec import DecoderSizes
from adapters.hf_directory import is_ir, read_ir_facts
from adapters.model_identity import ModelIdentity
from adapters.model_source import ModelSource, check_model, resolve
from adapters.model_store import ModelReplaced, ModelStore, StoreFull, StoreUnwritable
from adapters.own_tokenizer import TokenizerRecipe
from adapters.registry import get
from adapters.served_model import find_served, keep_head
from adapters.vocabulary import vocabulary_in
from orchestrator.fitting.precision import sizes_of
from orchestrator.worker.loading.memory import predict_memory
from tests.support import tiny_gguf, tiny_models
from tests.support.tiny_gguf import Tiny
from tests.support.tiny_ir import write_ir

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
    models, progress = ModelStore(store), Said()
    file = resolve(source, base)
    models.prepare(file, TokenizerRecipe(), progress)
    keep_head(models, file, progress)
    assert progress.read == len(file.content), "no byte is read twice"
    return Served(base, store, file, ModelIdentity(source, models.digest(file), file.name, file.source))


SPLIT = "model-00001-of-00003.gguf"
KINDS = ["gguf", "gguf with rope factors", "split gguf", "directory", "directory with a head beside a tied one"]
KINDS += ["IR directory"]


@pytest.fixture(params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Served:
    if request.param.startswith("split"):
        # Its rope factors, which opening it looks at, lie in the second file.
        tiny_gguf.write(tmp_path / "model.gguf", replace(MODEL, rope_factors=True), tensors_each=11, bare_first=True)
        return serve(tmp_path, tmp_path / "store", SPLIT)
    if request.param.startswith("gguf"):
        tiny_gguf.write(tmp_path / "model", replace(MODEL, rope_factors="rope" in request.param))
    elif request.param.startswith("IR"):
        write_ir(tmp_path / "model", "llama")
    else:
        tiny_models.write_model(tmp_path / "model", "llama", shards=2)
    if "tied" in request.param:
        config = tmp_path / "model" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    return serve(tmp_path, tmp_path / "store", "model")


def read_shape(path: Path) -> DecoderSizes:
    return read_ir_facts(path) if is_ir(path) else open_source(path).spec


def swap(served: Served) -> None:
    """Put another model at its place."""
    path = served.base / served.identity.source
    if path.name == SPLIT:
        for file in served.file.content:
            file.unlink()
        tiny_gguf.write(served.base / "model.gguf", replace(MODEL, layers=3), tensors_each=16, bare_first=True)
    elif path.is_dir():
        shutil.rmtree(path)
        tiny_models.write_model(path, "llama", num_hidden_layers=3)
    else:
        path.unlink()
        tiny_gguf.write(path, replace(MODEL, layers=3))


def remove(served: Served) -> None:
    path = served.base / served.identity.source
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def cut(served: Served) -> None:
    path = max(served.file.content, key=lambda file: file.stat().st_size)
    path.write_bytes(path.read_bytes()[:200])


def remove_last(served: Served) -> None:
    served.file.content[-1].unlink()


HARMS = [swap, remove, remove_last, cut]


def test_what_is_at_its_place_serves_where_it_is_the_same(served: Served) -> None:
    assert served.find() == served.file
    moved, path = served.base / "moved", served.base / served.identity.source
    path.rename(moved)
    moved.rename(path)
    progress = Said()
    served.find(progress)
    for file in served.file.content:
        file.touch()
    restored = served.find(progress)
    assert progress.read == 0, "the head says all that is needed"
    assert ModelStore(served.store).prepare(restored, TokenizerRecipe(), progress).is_dir()
    (prepared,) = served.store.glob(f"{served.identity.digest}/tokenizer-*/")
    shutil.rmtree(prepared)
    assert ModelStore(served.store).prepare(restored, TokenizerRecipe(), progress) == prepared
    assert progress.read >= len(served.file.content), "it was compared before it was prepared from"


@pytest.mark.parametrize("harm", HARMS)
def test_the_head_stands_for_files_that_were_replaced(served: Served, harm: Callable[[Served], None]) -> None:
    spec, vocabulary = read_shape(served.file.path), vocabulary_in(served.file)
    known, options = sizes_of(served.file), LoadOptions(device="CPU", kv_cache_bytes=1 << 20, slots=1)
    sizes = [file.stat().st_size for file in served.file.content]
    harm(served)
    progress = Said()
    restored = served.find(progress)
    assert (restored.name, restored.digest[:16]) == (served.file.name, served.identity.digest)
    assert [file.stat().st_size for file in restored.content] == sizes
    assert [file.name for file in restored.content] == [file.name for file in served.file.content]
    assert (read_shape(restored.path), vocabulary_in(restored)) == (spec, vocabulary)
    store = ModelStore(served.store)
    (prepared,) = served.store.glob(f"{served.identity.digest}/tokenizer-*/")
    assert sizes_of(restored) == known
    assert predict_memory(options, get("openvino_rt"), check_model(restored), prepared, logits_rows=16) is not None
    assert store.prepare(restored, TokenizerRecipe(), progress) == prepared
    assert store.find(restored, TokenizerRecipe()) == prepared
    assert store.digest(restored) == served.identity.digest
    assert progress.read == 0


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
    assert text.startswith(f"{served.identity.source}: ")
    assert "\n" not in text
    for words in (served.identity.digest, str(served.store), "at its place", "`outrider reload`"):
        assert words in text
    if harm is remove:
        assert "there is no " in text
    elif harm is remove_last and served.identity.source == SPLIT:
        assert f"the model is split into 3 files, and {served.base} lacks model-00003-of-00003.gguf" in text


def damage_sizes(head: Path) -> None:
    for file in head.iterdir():
        os.truncate(file, 0)


def damage_bytes(head: Path) -> None:
    for file in head.iterdir():
        with file.open("r+b") as stream:
            stream.seek(24)
            stream.write(b"\xff" * 16)


def remove_one(head: Path) -> None:
    next(head.iterdir()).unlink()


@pytest.mark.parametrize("harm", [damage_sizes, damage_bytes, remove_one])
def test_a_restored_head_that_is_damaged_is_made_anew(served: Served, harm: Callable[[Path], None]) -> None:
    spec = read_shape(served.file.path)
    remove(served)
    (directory,) = {file.parent for file in served.find().content}
    harm(directory)
    again = served.find()
    assert read_shape(again.path) == spec
    assert {file.parent for file in again.content} == {directory}
    assert {file.name for file in directory.parent.iterdir() if "restored" in file.name} == {directory.name}, (
        "nothing is left"
    )


def refuse_writes(number: int) -> Callable[..., None]:
    def open_or_refuse(path: str, mode: int = 0o777) -> None:
        if "restored-head" in str(path) and "outrider-head-" not in str(path):
            raise OSError(number, os.strerror(number))
        real(path, mode)

    real = os.mkdir
    return open_or_refuse


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_store_that_cannot_be_written_restores_elsewhere(
    served: Served, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_shape(served.file.path)
    remove(served)
    monkeypatch.setattr(os, "mkdir", refuse_writes(number))
    restored = served.find()
    assert read_shape(restored.path) == spec
    assert served.store not in restored.path.parents
    assert served.find().path == restored.path
    monkeypatch.setattr("tempfile.tempdir", str(served.base / "nowhere"))
    monkeypatch.setattr("adapters.served_model._own_places", {})
    with pytest.raises(StoreFull if number == errno.ENOSPC else StoreUnwritable, match=re.escape(str(served.store))):
        served.find()


def test_a_draft_keeps_which_tokens_its_outputs_are(tmp_path: Path) -> None:
    target = tiny_models.write_model(tmp_path / "target", "llama")
    tiny_models.write_reduced(tmp_path / "model", target, np.array([3, 5, 9, 40]), "some vocabulary")
    before, store = open_source(tmp_path / "model"), ModelStore(tmp_path / "store")
    file = resolve("model", tmp_path)
    keep_head(store, file, Said())
    served = Served(tmp_path, store.root, file, ModelIdentity("model", store.digest(file), file.name, file.source))
    remove(served)
    restored = open_source(served.find().path)
    assert (restored.spec, restored.output_ids) == (before.spec, before.output_ids)
    assert before.output_ids


def test_a_damaged_head_is_none(served: Served) -> None:
    (head,) = served.store.glob("*/head-*/files/")
    file = max(head.iterdir(), key=lambda file: file.stat().st_size)
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
