"""A model that is split into several GGUF files is one model for everyone, and its faults are told by the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from outrider_lab.gguf_layers import Layer, write_layers

from adapters import registry
from adapters.conformance.case import Case, load, prepare_case, run, text
from adapters.contract import Exactness, ModelRefused, silent
from adapters.decoder.from_gguf import GgufWeights
from adapters.gguf_splits import list_first_files, list_names, strip_number
from adapters.model_checks import check_files
from adapters.model_source import ModelSource, check_model, check_source, resolve
from adapters.model_store import ModelStore
from adapters.own_tokenizer import TokenizerRecipe
from adapters.source_meter import SourceMeter
from adapters.vocabulary import vocabulary_in
from orchestrator.fitting.precision import sizes_of
from tests.support.model_rows import loads_models
from tests.support.tiny_gguf import Tiny, list_split, write

RUNTIMES = ("openvino_rt", "onnx_rt", "torch_device", "llama_cpp")
TINY = Tiny("llama", hidden=256, mlp=256, head_dim=64, kind=GGMLQuantizationType.Q4_1, rope_factors=True)
FIRST = "tiny-Q4_1-00001-of-00004.gguf"


def write_split(directory: Path, tiny: Tiny = TINY, name: str = "tiny-Q4_1.gguf", *, bare_first: bool = False) -> Path:
    """Write a model of four files, three with tensors where the first is bare; return the first."""
    directory.mkdir(exist_ok=True)
    write(directory / name, tiny, tensors_each=8 if bare_first else 6, bare_first=bare_first)
    return list_split(directory / name)[0]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return write_split(tmp_path / "split")


@given(st.integers(1, 99_999), st.data())
def test_the_names_of_all_files_follow_from_one(count: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, count))
    names = list_names(f"a-q4-{number:05d}-of-{count:05d}.gguf")
    assert len(set(names)) == count
    assert names[number - 1] == f"a-q4-{number:05d}-of-{count:05d}.gguf"
    assert names[0] == f"a-q4-00001-of-{count:05d}.gguf"
    assert {strip_number(name) for name in (names[0], names[-1])} == {"a-q4.gguf"}


@given(st.text() | st.from_regex(r"a-\d{4,6}-of-\d{4,6}\.gguf", fullmatch=True))
def test_whatever_a_name_is_there_is_a_first_one_that_stands_for_itself(name: str) -> None:
    names = list_names(name)
    assert names == (name,) or list_names(names[0]) == names
    assert list_first_files([*names, "config.json"]) == ([names[0]] if names[0].endswith(".gguf") else [])


def test_only_first_files_are_offered() -> None:
    names = ["b-00002-of-00002.gguf", "b-00001-of-00002.gguf", "a.gguf", "c-00002-of-00002.gguf", "config.json"]
    assert list_first_files(names) == ["a.gguf", "b-00001-of-00002.gguf", "c-00002-of-00002.gguf"]


@pytest.mark.parametrize("bare_first", [False, True])
def test_a_split_model_is_one_model_of_all_its_files(tmp_path: Path, bare_first: bool) -> None:
    path = write_split(tmp_path, bare_first=bare_first)
    write(tmp_path / "tiny-Q4_1.gguf", TINY)
    split, whole = resolve(path.name, tmp_path), resolve("tiny-Q4_1.gguf", tmp_path)
    assert (split.path, split.name, split.files) == (path, whole.name, tuple(list_split(tmp_path / "tiny-Q4_1.gguf")))
    assert (whole.name, whole.files, len(split.files)) == ("tiny", (), 4)
    assert check_model(split) == check_model(whole)
    assert vocabulary_in(split) == vocabulary_in(whole)
    assert split.content == split.files
    assert replace(sizes_of(split), file_bytes=0) == replace(sizes_of(whole), file_bytes=0)
    assert sizes_of(split).file_bytes == sum(file.stat().st_size for file in split.files)
    assert SourceMeter(path, lambda done, total: None).total_bytes == sizes_of(split).file_bytes
    parts, other = GgufWeights(split.path), GgufWeights(whole.path)
    assert (parts.spec, parts.label) == (other.spec, other.label)
    for name in parts.spec.list_tensors():
        tensor, expected = parts.tensor(name), other.tensor(name)
        assert type(tensor) is type(expected)
        assert np.array_equal(tensor.float32(), expected.float32())


@loads_models(RUNTIMES, "GGUF", ["llama"])
@loads_models(RUNTIMES, "GGUF, split", ["llama"])
@pytest.mark.parametrize("adapter", RUNTIMES)
def test_split_and_whole_have_the_same_bits(tmp_path: Path, adapter: str) -> None:
    libraries = {"torch_device": "torch", "onnx_rt": "onnxruntime", "llama_cpp": "ik_llama_cpp"}
    pytest.importorskip(libraries.get(adapter, "openvino"))
    # Of llama.cpp's classes none need hold for a model of these sizes, and the same rows have the same bits in any.
    exactness = Exactness.KERNEL if adapter == "llama_cpp" else Exactness.BIT
    tiny = replace(TINY, rope_factors=adapter != "llama_cpp")  # which ik_llama.cpp passes over
    write(tmp_path / "whole.gguf", tiny)
    rows = []
    for source in (tmp_path / "whole.gguf", write_split(tmp_path / "split", tiny, bare_first=True)):
        case = Case(adapter, "CPU", source)
        prepared = prepare_case(case, registry.get(adapter), tmp_path / source.stem)
        model = load(prepared, kv_cache_bytes=1 << 24, exactness=exactness)
        rows.append(run(model, 0, text(model, 12), [1, 11]))
        model.close()
    assert np.array_equal(rows[0], rows[1])


def test_any_file_that_is_replaced_makes_another_model(tmp_path: Path, first: Path) -> None:
    store, (file, other) = ModelStore(tmp_path / "store"), (resolve(str(first), tmp_path), tmp_path / "other")
    before = store.digest(file)
    made = store.prepare(file, TokenizerRecipe(), silent)
    assert made.parent.name == before
    for changed in resolve(str(write_split(other, replace(TINY, seed=6))), tmp_path).files[1:]:
        kept = (first.parent / changed.name).read_bytes()
        changed.replace(first.parent / changed.name)
        assert store.digest(resolve(str(first), tmp_path)) != before
        (first.parent / changed.name).write_bytes(kept)
    assert store.prepare(resolve(str(first), tmp_path), TokenizerRecipe(), silent) == made


def test_layers_are_taken_from_all_files(tmp_path: Path, first: Path) -> None:
    write(tmp_path / "whole.gguf", TINY)
    for name, source in (("one", tmp_path / "whole.gguf"), ("other", first)):
        write_layers(tmp_path / f"{name}.gguf", source, [Layer(0), Layer(1), Layer(1, passes=True)])
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()


def remove(directory: Path, *numbers: int) -> None:
    for number in numbers:
        (directory / f"tiny-Q4_1-{number:05d}-of-00004.gguf").unlink()


def name_all(directory: Path, name: str) -> None:
    for number in range(1, 5):
        (directory / f"tiny-Q4_1-{number:05d}-of-00004.gguf").rename(directory / name.format(number=number))


def exchange(directory: Path, one: int, other: int) -> None:
    files = [directory / f"tiny-Q4_1-{number:05d}-of-00004.gguf" for number in (one, other)]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)


def mix(directory: Path, tiny: Tiny, number: int, tensors_each: int = 6) -> None:
    """Put a file of another model into the place of one."""
    other = directory / "other"
    other.mkdir()
    write(other / "m.gguf", tiny, tensors_each=tensors_each)
    list_split(other / "m.gguf")[number - 1].replace(directory / f"tiny-Q4_1-{number:05d}-of-00004.gguf")


def rewrite(directory: Path, number: int, key: str = "", value: int = 0, double: str = "") -> None:
    """Write a file anew with another value of a key, or with the tensors of file `double`, too."""
    path = directory / f"tiny-Q4_1-{number:05d}-of-00004.gguf"
    readers = [GGUFReader(path)] + ([GGUFReader(directory / double)] if double else [])
    writer = GGUFWriter(path.with_suffix(".new"), "")
    writer.kv_data[0].clear()
    for name, field in readers[0].fields.items():
        if not name.startswith("GGUF."):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, value if name == key else field.contents(), field.types[0], sub_type)
    for tensor in [tensor for reader in readers for tensor in reader.tensors]:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def count_too_many(directory: Path) -> None:
    for number in range(1, 5):
        rewrite(directory, number, "split.tensors.count", 40)


def cut_last(directory: Path) -> None:
    path = directory / "tiny-Q4_1-00004-of-00004.gguf"
    path.write_bytes(path.read_bytes()[:-5000])


FAULTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a file is missing": (lambda at: remove(at, 3), [FIRST, "tiny-Q4_1-00003-of-00004.gguf", "into one directory"]),
    "all others are missing": (lambda at: remove(at, 2, 3, 4), ["4 files", "-00002-of", "-00003-of", "-00004-of"]),
    "two changed places": (lambda at: exchange(at, 2, 4), ["-00002-of-00004.gguf: split.no: it is 3", "again"]),
    "the first changed places": (lambda at: exchange(at, 1, 2), [f"{FIRST}: split.no: it is 1", "again"]),
    "of another count": (lambda at: mix(at, TINY, 2, 9), ["-00002-of-00004.gguf: split.count: it is 3", "again"]),
    "of a larger model": (
        lambda at: mix(at, replace(TINY, bias=True), 2, 7),
        ["-00002-of-00004.gguf: split.tensors.count", "of another model", "again"],
    ),
    "of a wider model": (lambda at: mix(at, replace(TINY, mlp=512), 3), ["-00003-of-00004.gguf: blk.", "shape"]),
    "a tensor twice": (
        lambda at: rewrite(at, 3, double="tiny-Q4_1-00002-of-00004.gguf"),
        ["-00003-of-00004.gguf: the tensor blk.", "is in tiny-Q4_1-00002-of-00004.gguf, too", "again"],
    ),
    "too few tensors": (
        count_too_many,
        [f"{FIRST}: split.tensors.count: it is 40, and the files hold 22", "again"],
    ),
    "cut short": (cut_last, ["-00004-of-00004.gguf: it is truncated"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_one_of_the_files_is_told_by_its_name(first: Path, fault: str) -> None:
    harm, words = FAULTS[fault]
    check_source(FIRST, first.parent)
    harm(first.parent)
    with pytest.raises(ModelRefused) as refusal:
        check_source(FIRST, first.parent)
    for word in words:
        assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ModelRefused):
        GgufWeights(first)


@pytest.mark.parametrize("name", ["{number}.gguf", "m-{number}-of-4.gguf", "m-0000{number}-of-00005.gguf"])
def test_files_of_other_names_are_refused_with_the_names_that_they_had(first: Path, name: str) -> None:
    name_all(first.parent, name)
    with pytest.raises(ModelRefused, match=r"split\.count: it is file 1 of 4 .*NAME-00001-of-00004\.gguf"):
        resolve(name.format(number=1), first.parent)


@pytest.mark.parametrize("number", [2, 4])
def test_another_file_than_the_first_says_which_to_name(first: Path, number: int) -> None:
    source = FIRST.replace("00001", f"{number:05d}")
    with pytest.raises(ModelRefused, match=rf"file {number} of 4 .*Name the first one: {FIRST}"):
        resolve(source, first.parent)


def test_offers_name_first_files_only(first: Path) -> None:
    for source in ("tiny-Q4_1.gguf", "."):
        with pytest.raises(ModelRefused, match=FIRST) as refusal:
            resolve(source, first.parent)
        assert "00002-of" not in str(refusal.value)


def test_a_file_alone_that_is_named_as_one_of_several_is_one_model(tmp_path: Path) -> None:
    """llama-gguf-split writes such where all fits into one file; a name alone says nothing of the content."""
    for name, metadata in (
        ("a-00001-of-00001.gguf", {"split.no": 0, "split.count": 1}),
        ("a-00001-of-00003.gguf", {"split.no": 0, "split.count": 0}),
    ):
        write(tmp_path / name, TINY, metadata)
        source = resolve(name, tmp_path)
        assert (source.name, source.files) == ("a", ())
        check_files(source.path)


def test_a_package_carries_a_split_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "split_weights_4b2"
    package.mkdir(parents=True)
    write_split(package)
    monkeypatch.syspath_prepend(tmp_path / "site")
    source: ModelSource = resolve(f"package:split-weights-4b2/{FIRST}", Path())
    assert (source.name, source.path, len(source.files)) == ("tiny", package / FIRST, 4)
    with pytest.raises(ModelRefused, match=rf"GGUF files in it: {FIRST}\."):
        resolve("package:split-weights-4b2/x.gguf", Path())
