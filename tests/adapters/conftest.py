"""The conformance suite's models: each is prepared and loaded once for the files that test it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adapters import registry
from adapters.conformance.case import Case, Prepared, load, prepare_case
from adapters.conformance.fixtures import all_free as all_free
from adapters.conformance.fixtures import model as model
from adapters.contract import LoadedModel, StaticShapes
from adapters.libllama import find_mainline
from adapters.llama_cpp.adapter import LlamaCppAdapter
from adapters.llama_cpp.library import load_library
from tests.support import tiny_decoders, tiny_models, vulkan
from tests.support.conformance import ADAPTERS, DEVICES
from tests.support.failing import poison
from tests.support.first_layers import write_first_layers
from tests.support.own_graphs import GraphForm
from tests.support.tiny_llama_files import write_llama_file

_SLOW_OVER_LONG_CONTEXTS = ("onnx_rt", "torch_device")


@dataclass(frozen=True)
class LibraryCase(Case):
    """One that runs on the library of a package, which is not the one that is used without a word. `package`: of
    mainline llama.cpp; "vulkan": a build for Vulkan."""

    package: str = ""


@pytest.fixture(scope="session", params=ADAPTERS)
def case(request, tmp_path_factory) -> Case:
    """An adapter and a model for it."""
    named, _, package = request.param.partition("+")
    rest, _, tier = named.partition("#")
    rest, _, weights = rest.partition("@")
    name, tiny, static = [*rest.split("/"), "", ""][:3]
    root = tmp_path_factory.mktemp(name)
    shared: dict[str, Any] = {"adapter": name, "device": DEVICES[name], "poison": poison, "tier": int(tier or 0)}
    if name == "simulated":
        source = root / "script.txt"
        source.write_text("")
        damage: dict[str, Any] = {"damaged": b"fault=nothing-like-that", "damage_told": "nothing-like-that"}
        return Case(source=source, **shared, **damage)
    if tiny and name == "llama_cpp":
        source = write_llama_file(root, tiny, hidden=256, heads=8, kv_heads=8, head_dim=32, layers=4)
        return LibraryCase(source=source, package=package, **shared)
    if tiny in tiny_decoders.DECODERS:
        source = tiny_decoders.write_decoder(root / tiny, tiny)
    elif tiny:
        source = tiny_models.write_model(root / tiny, tiny, kind="BF16")
    elif package == "vulkan":
        source = write_llama_file(root, "olmo2", hidden=256, kv_heads=4, head_dim=64, context=512)
        return LibraryCase(source=source, package=package, **shared | {"device": vulkan.DEVICE})
    elif package:  # what is known of the classes of two layers is the usual library's
        source = write_first_layers(root / "layers.gguf", request.getfixturevalue("default_model_path"), 3)
        return LibraryCase(source=source, package=package, **shared)
    else:
        source = request.getfixturevalue("first_layers_path")
    if name == "openvino_llama":  # more than half of its KV cache is the reader's
        shared["small_blocks"] = 28
    shapes = StaticShapes(on=bool(static), prefill_rows=32, verify_rows=(1, 4))
    return Case(source=source, weights=weights, static=shapes, **shared)


@pytest.fixture(scope="module")
def own_graph(form: GraphForm, tmp_path_factory) -> Path:
    """A small model in the form of directories that the file, or each of its tests in turn, is about."""
    return form.write(tmp_path_factory.mktemp("graph") / "My Tiny-Graph", form.sample)


@pytest.fixture
def own_graph_copy(own_graph: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(own_graph, tmp_path / "copy"))


@pytest.fixture(scope="session")
def conformance_store(shared_store) -> Path:
    return shared_store


@pytest.fixture(scope="session")
def prepared(case: Case, conformance_store: Path) -> Prepared:
    """A model that the adapter has prepared."""
    if not (isinstance(case, LibraryCase) and case.package):
        return prepare_case(case, registry.get_for(case.adapter, case.device, case.static), conformance_store)
    place = vulkan.find_place() if case.package == "vulkan" else find_mainline(case.package)
    assert place is not None
    return prepare_case(case, LlamaCppAdapter(partial(load_library, place)), conformance_store)


@pytest.fixture
def far(prepared: Prepared, model: LoadedModel, tmp_path: Path) -> Iterator[LoadedModel]:
    """A model with a long context. On ONNX Runtime and torch the default model takes half a minute over its own. A
    model of two layers has the same positions, blocks, head size and queries for a key."""
    context = model.capabilities.max_context_tokens
    if prepared.adapter.name not in _SLOW_OVER_LONG_CONTEXTS or context < 4096:
        yield model
        return
    heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
    changes = heads | {"num_hidden_layers": 2, "max_position_embeddings": context}
    source = tiny_models.write_model(tmp_path / "far", "llama", kind="BF16", **changes)
    small_case = Case(prepared.adapter.name, prepared.case.device, source, static=prepared.case.static)
    small = load(prepare_case(small_case, prepared.adapter, tmp_path / "store"))
    assert small.capabilities.max_context_tokens == context
    yield small
    small.close()
