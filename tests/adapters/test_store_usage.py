"""What a store takes, what of it a configuration uses, and the command that removes the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.artefact import Origin, write_manifest
from adapters.model_store import ModelStore, short_hash
from adapters.store_bound import bound_store
from adapters.store_usage import SourceUse, measure_directory, measure_store
from tests.support.daemon import configuration, running

SOURCES = ("one.gguf", "two.gguf", "hf:org/three@0123")
ADAPTERS = ("openvino_rt", "onnx_rt", "torch_device")


def digest_of(source: str) -> str:
    return blake2b(source.encode(), digest_size=16).hexdigest()


def put(root: Path, source: str, adapter: str, recipe: str = "graph, 1; lib 1", size: int = 70_000) -> Path:
    digest = digest_of(source)
    artefact = root / digest[:16] / f"{adapter}-{short_hash(recipe)}"
    artefact.mkdir(parents=True)
    (artefact / "weights.bin").write_bytes(b"x" * size)
    write_manifest(artefact, Origin(source, digest, adapter, recipe))
    return artefact


def note_created(artefact: Path, when: str) -> None:
    file = artefact / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "created": when}))


@settings(max_examples=30, deadline=None)
@given(
    made=st.sets(st.tuples(st.sampled_from(SOURCES), st.sampled_from(ADAPTERS)), max_size=6),
    used=st.sets(st.tuples(st.sampled_from(SOURCES), st.sampled_from((*ADAPTERS, "auto"))), max_size=3),
)
def test_what_is_used_and_what_could_go_are_all_there_is(tmp_path_factory, made, used):
    root = tmp_path_factory.mktemp("store")
    for source, adapter in made:
        put(root, source, adapter)
        if not list((root / digest_of(source)[:16]).glob("tokenizer-*")):
            put(root, source, "tokenizer", size=5_000)
    usage = measure_store(root, [SourceUse(*use) for use in used])
    sources = {source for source, _ in used}
    unused = {(artefact.source, artefact.path.name.rpartition("-")[0]) for artefact in usage.unused}
    for source, adapter in made:
        runs = {runtime for of, runtime in used if of == source}
        assert ((source, adapter) in unused) == (not runs & {adapter, "auto"})
        assert ((source, "tokenizer") in unused) == (source not in sources)
    assert usage.sources == len({source for source, _ in made})
    assert usage.used_bytes + usage.unused_bytes <= usage.total_bytes
    assert all(artefact.size_bytes >= 5_000 and artefact.why for artefact in usage.unused)


def test_an_older_one_of_the_same_could_go_and_another_number_format_not(tmp_path: Path):
    old, new = (put(tmp_path, "a", "onnx_rt", f"graph, {n}; lib {n}") for n in (1, 2))
    other = put(tmp_path, "a", "onnx_rt", "graph, int8 weights, 1; lib 1")
    for artefact, when in ((old, "2026-01-01"), (new, "2026-02-01"), (other, "2025-01-01")):
        note_created(artefact, when)
    usage = measure_store(tmp_path, [SourceUse("a", "onnx_rt")])
    assert [(artefact.path, artefact.why) for artefact in usage.unused] == [(old, "a later one was made of the same")]


def test_a_commit_of_the_hub_is_the_same_model_and_files_are_known_by_their_digest(tmp_path: Path):
    hub, file = put(tmp_path, "hf:org/three@0123", "onnx_rt"), put(tmp_path, "elsewhere.gguf", "onnx_rt")
    uses = [SourceUse("hf:org/three", "onnx_rt"), SourceUse("here.gguf", "onnx_rt", file.parent.name)]
    assert measure_store(tmp_path, uses).unused == ()
    replaced = [SourceUse("hf:org/three", "onnx_rt"), SourceUse("elsewhere.gguf", "onnx_rt", "0" * 16)]
    assert [artefact.path for artefact in measure_store(tmp_path, replaced).unused] == [file]
    assert hub.is_dir()


def test_what_somebody_makes_or_verifies_is_not_removed(tmp_path: Path):
    artefact = put(tmp_path, "a", "onnx_rt")
    with FileLock(f"{artefact}.lock"):
        assert not ModelStore(tmp_path).remove(artefact)
        assert artefact.is_dir()
    assert ModelStore(tmp_path).remove(artefact)
    assert [path for path in artefact.parent.iterdir() if path.is_dir()] == []


def leave(root: Path, source: str, adapter: str) -> Path:
    """Leave what a conversion that is ended leaves."""
    draft = root / digest_of(source)[:16] / f".{adapter}-0123abcd.new-4711-89abcdef"
    draft.mkdir(parents=True)
    (draft / "weights.bin").write_bytes(b"x" * 9_000)
    (draft / "weights.kept").write_text("[[1, 2, 3]]\n")
    return draft


@pytest.mark.parametrize(("digest", "named"), [("known", True), ("known", False), ("", True), ("", False)])
def test_what_an_ended_conversion_left_is_of_use_to_who_has_its_model_and_runtime(tmp_path: Path, digest, named):
    """`named`: the store knows the source's name by something else that was made of it."""
    draft = leave(tmp_path, "a", "onnx_rt")
    if named:
        put(tmp_path, "a", "tokenizer", size=5_000)

    def why_unused(source: str, adapter: str) -> str:
        use = SourceUse(source, adapter, digest_of(source)[:16] if digest else "")
        usage = measure_store(tmp_path, [use])
        assert usage.used_bytes + usage.unused_bytes <= usage.total_bytes
        whys = [artefact.why for artefact in usage.unused if artefact.path == draft]
        assert whys or usage.used_bytes >= 9_000
        return "".join(whys)

    assert why_unused("a", "onnx_rt") == why_unused("a", "auto") == ""
    if digest or named:
        assert why_unused("b", "onnx_rt") == "its conversion was ended, and the configuration has no such model"
        assert "runs this model on torch_device" in why_unused("a", "torch_device")
    else:  # it may be of that model
        assert why_unused("b", "onnx_rt") == ""


def test_what_a_conversion_left_goes_once_it_was_made_and_not_while_somebody_goes_on_with_it(tmp_path: Path):
    draft, store = leave(tmp_path, "a", "onnx_rt"), ModelStore(tmp_path)
    other = leave(tmp_path, "a", "openvino_rt")
    made = put(tmp_path, "a", "onnx_rt")
    note_created(made, "9999-01-01")
    usage = measure_store(tmp_path, [SourceUse("a", "auto")])
    assert [(artefact.path, artefact.source) for artefact in usage.unused] == [(draft, "a")]
    with FileLock(draft.with_name("onnx_rt-0123abcd.lock")):
        assert not store.remove(draft)
        assert draft.is_dir()
    assert store.remove(draft)
    assert (draft.exists(), other.is_dir(), made.is_dir()) == (False, True, True)


def test_a_draft_whose_manifest_is_written_is_no_artefact(tmp_path: Path):
    draft = leave(tmp_path, "a", "onnx_rt")
    write_manifest(draft, Origin("a", digest_of("a"), "onnx_rt", "graph, 1; lib 1"))
    assert ModelStore(tmp_path).all() == []


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    put(store, "other.gguf", "onnx_rt")
    leave(store, "other.gguf", "torch_device")
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {source: 'simulated:toy', adapter: simulated}\n"
        f"store: {{directory: {store}}}\nstate: {{directory: {tmp_path}}}\n"
    )
    return path


def test_doctor_tells_what_could_go_and_prune_removes_it_when_asked(configured: Path, outrider):
    def look() -> dict[str, str]:
        checks = json.loads(outrider("doctor", "--json", "--config", str(configured)).stdout)
        return next(check for check in checks if check["name"] == "prepared models")

    before = look()
    assert "of 1 source(s): 0 B in use by the configuration, " in before["found"]
    assert "could go (`outrider models prune`)" in before["found"]
    assert before["todo"] == "outrider models prune"
    process = outrider("models", "prune", "--config", str(configured))
    assert process.returncode == 2
    assert "say --yes" in process.stderr
    assert look() == before
    done = outrider("models", "prune", "--config", str(configured), "--yes", "--json")
    report = json.loads(done.stdout)
    assert (len(report["removed"]), report["kept"]) == (2, [])
    assert "other.gguf: the configuration has no such model" in done.stderr
    assert look()["todo"] == ""


def test_status_tells_what_the_store_takes_now(tmp_path: Path, outrider):
    path = configuration(tmp_path)
    with running(path) as daemon:
        assert daemon.status()["store"]["unused"] == []
        artefact = put(tmp_path / "store", "other.gguf", "onnx_rt")
        (unused,) = daemon.status()["store"]["unused"]
        assert (unused["path"], unused["source"]) == (str(artefact), "other.gguf")
        shown = outrider("status", "--socket", str(daemon.admin)).stdout.replace("│", " ")
    assert "0 B in use by the configuration" in " ".join(shown.split())
    assert "could go (`outrider models prune`)" in " ".join(shown.split())


def list_formats(root: Path) -> set[str]:
    return {path.parent.name.rpartition("-")[0] for path in root.glob("*/*/manifest.json")}


def test_a_bound_lets_the_least_used_go_and_nothing_that_is_used(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    ages = {"onnx_rt": 10, "openvino_rt": 30, "torch_device": 20, "tokenizer": 40, "head": 50}
    made = {recipe: put(tmp_path, "a", recipe) for recipe in ages}
    for recipe, age_s in ages.items():
        os.utime(made[recipe], (1e9 - age_s, 1e9 - age_s))
    each = measure_directory(made["onnx_rt"])
    assert not bound_store(store, 5 * each)
    with in_another_process(made["openvino_rt"]):
        assert bound_store(store, 4 * each) == [made["torch_device"]]
        assert bound_store(store, 0) == [made["onnx_rt"]]
        assert list_formats(tmp_path) == {"openvino_rt", "tokenizer", "head"}
    assert bound_store(store, 0) == [made["openvino_rt"]]
    assert list_formats(tmp_path) == {"tokenizer", "head"}


def test_what_a_used_one_links_into_stays(tmp_path: Path) -> None:
    whole = put(tmp_path, "a", "openvino_llama")
    linked = put(tmp_path, "a", "openvino_rt", size=0)
    (linked / "weights.bin").unlink()
    (linked / "weights.bin").symlink_to(whole / "weights.bin")
    size = sum(map(measure_directory, (whole, linked)))
    assert not bound_store(ModelStore(tmp_path), size), "what is linked to counts once"
    with in_another_process(linked):
        assert not bound_store(ModelStore(tmp_path), 0)
    assert set(bound_store(ModelStore(tmp_path), 0)) == {whole, linked}


@contextmanager
def in_another_process(artefact: Path) -> Iterator[None]:
    """A process that has loaded an artefact, and is killed at the end."""
    program = "import sys, time; from pathlib import Path; from adapters.artefact_use import hold_use\n"
    program += "hold_use(Path(sys.argv[1])); print(flush=True); time.sleep(999)"
    command = [sys.executable, "-c", program, str(artefact)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            os.utime(artefact.with_name(f"{artefact.name}.used"), (0, 0))  # its age is not what saves it
            yield
        finally:
            process.kill()
