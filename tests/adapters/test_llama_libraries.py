"""Which library stands behind llama.cpp, what of one is checked before it is called, and mainline's states."""

from __future__ import annotations

import ctypes
import json
import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.conformance import case
from adapters.contract import (
    ALL_LAYERS,
    AdapterUnavailable,
    LoadOptions,
    RuntimeFailed,
    Segment,
    Unsupported,
    silent,
)
from adapters.device_check import check_device
from adapters.device_memory import read_device_memory
from adapters.hardware import runtime_version
from adapters.libllama import FORK, VARIABLE, LibraryPlace, find_library, find_mainline
from adapters.llama_cpp.adapter import LlamaCppAdapter
from adapters.llama_cpp.library import load_library
from adapters.llama_cpp.mainline import MainlineLibrary
from adapters.llama_cpp.mainline_state import read_format, without_head
from adapters.llama_cpp.model import LlamaModel
from adapters.llama_cpp.native import IN_ANY_ROWS
from tests.support.conformance import NO_FORK, NO_MAINLINE
from tests.support.model_rows import loads_models
from tests.support.stub_libllama import NEEDS_COMPILER, build_stub
from tests.support.tiny_llama_files import ARCHITECTURES, RECURRENT, write_llama_file

HEAD = struct.pack("<II", 0xAF143CD8, 0)
KEEPING = [architecture for architecture in ARCHITECTURES if architecture not in RECURRENT]


def write_caches(rows, *, layers, cell_ints=3, words=b"", transposed=0, has_values=True) -> bytes:
    """Return what llama.cpp writes of KV caches: `rows` are, for each of them, arrays of (positions, bytes)."""
    parts = []
    for cache in rows:
        count, left = len(cache[0]), list(cache)
        more = left.pop(0) if cell_ints == 6 else None
        parts.append(struct.pack("<II", 1, count))
        for place in range(count):
            parts.append(struct.pack("<iI", place, 1) + (b"" if more is None else more[place].tobytes()) + bytes(4))
        parts.append(struct.pack("<II", transposed, layers) + words)
        for number, own in enumerate(left):
            if number < layers or not transposed:
                parts.append(struct.pack("<iQ", 1, own.shape[1]) + own.tobytes())
            else:
                elements = own.view(np.uint16)
                parts.append(struct.pack("<iII", 1, 2, elements.shape[1]) + np.ascontiguousarray(elements.T).tobytes())
    return b"".join(parts)


@st.composite
def states(draw):
    """Yield the rows of KV caches, and how they are written."""
    layers, count, caches = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 2))
    written = {
        "layers": layers,
        "cell_ints": draw(st.sampled_from((3, 6))),
        "words": draw(st.sampled_from((b"", bytes(8), struct.pack("<II", 1, 0)))),
        "transposed": draw(st.integers(0, 1)),
        "has_values": draw(st.booleans()),
    }
    sizes = [draw(st.integers(4, 9)) * 2 for _ in range(2 * layers if written["has_values"] else layers)]
    sizes = [12, *sizes] if written["cell_ints"] == 6 else sizes
    random = np.random.default_rng(draw(st.integers(0, 99)))
    rows = [[random.integers(0, 256, (count, size), np.uint8) for size in sizes] for _ in range(caches)]
    return rows, written


@given(states())
def test_states_of_every_kind_are_split_and_joined_again_byte_for_byte(drawn):
    rows, written = drawn
    state = np.frombuffer(write_caches(rows, **written), np.uint8)
    sequence = np.frombuffer(HEAD + state.tobytes(), np.uint8)
    form = read_format(state, sequence)
    parts = form.split(state)
    assert form.join(parts).tobytes() == sequence.tobytes()
    assert sum(form.row_bytes) == form.position_bytes == sum(row.shape[1] for cache in rows for row in cache)
    fewer = [part[:1] for part in parts]
    assert np.array_equal(form.split(form.join(fewer)[len(HEAD) :])[0], fewer[0])


def test_states_that_are_not_understood_are_refused():
    rows = [[np.arange(24, dtype=np.uint8).reshape(3, 8)] * 2]
    whole = write_caches(rows, layers=1)

    def read(state: bytes):
        return read_format(np.frombuffer(state, np.uint8), np.frombuffer(HEAD + state, np.uint8))

    form = read(whole)
    gap = bytearray(whole)
    gap[8 + 12] = 7  # the second cell's position
    for damaged in (whole[:-1], whole[:30], whole + bytes(4), bytes(gap), struct.pack("<II", 2, 1) + whole[8:], b"x"):
        with pytest.raises(RuntimeFailed, match=r"state|layer"):
            read(damaged)
        with pytest.raises(RuntimeFailed, match=r"state|layer"):
            form.split(np.frombuffer(damaged, np.uint8))
    with pytest.raises(RuntimeFailed, match="not that of its context"):
        read_format(np.frombuffer(whole, np.uint8), np.frombuffer(HEAD, np.uint8))
    with pytest.raises(RuntimeFailed, match="another format"):
        form.split(np.frombuffer(write_caches(rows * 2, layers=1), np.uint8))
    with pytest.raises(RuntimeFailed, match="holds no KV cache"):
        without_head(np.frombuffer(struct.pack("<I", 5) + b"llama", np.uint8))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("more", "lazy"), [("", True), ("void *more;", True), ("", False)], ids=["shorter", "longer", "not-lazy"]
)
def test_a_build_whose_structures_are_known_lists_its_devices(tmp_path, monkeypatch, more, lazy):
    file = build_stub(tmp_path / "libllama.so", more=more, lazy=lazy)
    monkeypatch.setenv(VARIABLE, str(file))
    library = load_library(find_library())
    profiles = LlamaCppAdapter(lambda: library).devices()
    assert [(profile.name, profile.kind, profile.in_host_memory) for profile in profiles] == [
        ("CPU", "cpu", True),
        ("Vulkan0", "gpu", False),
        ("Vulkan1", "gpu", True),
    ]
    assert [profile.memory_bytes for profile in profiles[1:]] == [4 << 20, 4 << 20]
    assert [device.kind for device in library.list_devices()] == ["discrete", "integrated"]
    assert [read_device_memory(profile) for profile in profiles[1:]] == [(4 << 20, 3 << 20)] * 2
    assert check_device("llama_cpp", "Vulkan0") == check_device("llama_cpp", "CPU")
    with pytest.raises(Unsupported, match=r"no device .CUDA0. here; it has CPU, Vulkan0, Vulkan1"):
        check_device("llama_cpp", "CUDA0")


@NEEDS_COMPILER
@pytest.mark.parametrize("lazy", [True, False])
def test_a_number_of_layers_reaches_the_library_for_a_gpu_alone(tmp_path, lazy):
    file = build_stub(tmp_path / "libllama.so", lazy=lazy)
    library = MainlineLibrary(file, str(file), "1")
    seen = ctypes.c_int32.in_dll(ctypes.CDLL(str(file)), "seen_layers")
    for device, layers, expected in (("Vulkan0", 5, 5), ("Vulkan1", ALL_LAYERS, -1), ("Vulkan0", 0, 0), ("CPU", 5, 0)):
        assert not library.load_model(tmp_path / "no.gguf", device, layers, lambda fraction: True)
        assert seen.value == expected


@NEEDS_COMPILER
def test_other_builds_are_refused_before_anything_of_them_is_called_with_their_file_and_the_way_out(tmp_path):
    shifted = build_stub(tmp_path / "shifted.so", more="bool more[24];")
    with pytest.raises(AdapterUnavailable, match=rf"shifted\.so\) has other structures.*{VARIABLE}"):
        MainlineLibrary(shifted, str(shifted), "1")
    lacking = build_stub(tmp_path / "lacking.so", without="llama_memory_seq_rm")
    with pytest.raises(AdapterUnavailable, match=rf"no function llama_memory_seq_rm: .*lacking\.so.*{VARIABLE}"):
        MainlineLibrary(lacking, str(lacking), "1")
    (tmp_path / "no.so").write_text("no library")
    with pytest.raises(AdapterUnavailable, match=r"no\.so cannot be loaded"):
        MainlineLibrary(tmp_path / "no.so", str(tmp_path / "no.so"), "1")


def test_the_users_own_build_goes_before_packages_and_its_version_is_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    if find_spec(FORK) is not None:
        assert find_library().package == FORK
        assert runtime_version("llama_cpp").startswith("ik-llama-cpp-python")
    file = tmp_path / "libllama.so"
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(AdapterUnavailable, match=rf"{VARIABLE} names .*libllama\.so, which cannot be read"):
        find_library()
    file.write_bytes(b"one")
    first = runtime_version("llama_cpp")
    (tmp_path / "libggml-cpu.so").write_bytes(b"one")
    second = runtime_version("llama_cpp")
    (tmp_path / "libggml-cpu.so").write_bytes(b"another")
    assert len({first, second, runtime_version("llama_cpp")}) == 3
    assert find_library().file == file


@NEEDS_COMPILER
def test_a_configuration_names_a_library_to_every_process(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    build_stub(tmp_path / "libllama.so")
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "model: {source: 'simulated:toy', adapter: simulated}\nadapters: {llama_cpp: {library: libllama.so}}\n"
        f"store: {{directory: {tmp_path / 'store'}}}\n"
    )
    command = [sys.executable, "-m", "orchestrator.cli.main", "devices", "--json", "--config", str(config)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [row for row in json.loads(process.stdout) if row["runtime"] == "llama_cpp"]
    assert [row["device"] for row in rows] == ["CPU", "Vulkan0", "Vulkan1"]
    assert {row["runtime_version"].split()[0] for row in rows} == {"libllama"}
    assert [row["memory_free_bytes"] for row in rows[1:]] == [3 << 20, 3 << 20]
    assert [row["hardware"]["name"].partition(", by")[0] for row in rows[1:]] == [
        "a GPU",
        "a GPU in the processor, integrated",
    ]


@NO_FORK
@NO_MAINLINE
def test_a_class_that_one_library_keeps_is_not_taken_for_another(tmp_path, monkeypatch):
    places = (LibraryPlace(FORK, None, ""), find_mainline("xllamacpp"))
    adapters = [LlamaCppAdapter(partial(load_library, place)) for place in places]
    widths = iter((1, 2))
    monkeypatch.setattr(case, "_find_exact", lambda *asked: replace(IN_ANY_ROWS, fixed_width=next(widths)))
    classes = [case.exact_class(adapter, tmp_path, LoadOptions(device="CPU")) for adapter in (*adapters, *adapters)]
    assert [kind.fixed_width for kind in classes] == [1, 2, 1, 2]


@NO_MAINLINE
@loads_models("llama_cpp", "GGUF", KEEPING, write_llama_file, needs="xllamacpp")
@pytest.mark.parametrize("architecture", KEEPING)
def test_mainline_goes_on_from_a_state_as_from_its_own_forwards(tmp_path, architecture):
    """A sequence outgrows its contexts, is rolled back behind what a sliding window has left, is forked and moved."""
    place = find_mainline("xllamacpp")
    assert place is not None
    library = load_library(place)
    adapter = LlamaCppAdapter(lambda: library)
    (tmp_path / "prepared").mkdir()
    adapter.prepare(write_llama_file(tmp_path, architecture), tmp_path / "prepared", silent)
    options = LoadOptions(slots=4, kv_cache_bytes=16 << 20, threads=1)
    model = adapter.load(tmp_path / "prepared", options, silent)
    assert isinstance(model, LlamaModel)
    tokens = [(7 * i * i + i) % model.spec.vocabulary_size for i in range(400)]
    whole = model.forward([Segment(0, 0, tokens, (0, 400))]).logits.copy().view(np.uint32)
    for start, end in ((0, 250), (250, 390), (390, 400)):
        model.forward([Segment(1, start, tokens[start:end], (0, 0))])
    model.fork(2, 1, 395, 0)
    model.import_kv(3, 393, np.concatenate(list(model.export_kv(1, 393))))
    for slot, start in ((1, 20), (2, 395), (2, 30), (3, 393), (3, 40)):
        rows = model.forward([Segment(slot, start, tokens[start:], (0, 400 - start))]).logits.view(np.uint32)
        assert np.array_equal(rows, whole[start:])
    model.close()
