"""The conformance suite's models: each is prepared and loaded once for the files that test it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from adapters import registry
from adapters.contract import LoadedModel, StaticShapes
from tests.support import tiny_models
from tests.support.conformance import ADAPTERS, DEVICES, Prepared, load, prepare_by


@pytest.fixture(scope="session", params=ADAPTERS)
def prepared(request, tmp_path_factory, shared_store) -> Prepared:
    """A prepared model and its adapter."""
    rest, _, tier = request.param.partition("#")
    rest, _, weights = rest.partition("@")
    name, tiny, static = [*rest.split("/"), "", ""][:3]
    shapes = StaticShapes(on=bool(static), prefill_rows=32, verify_rows=(1, 4))
    adapter = registry.get_for(name, DEVICES[name], shapes)
    root = tmp_path_factory.mktemp(name)
    if tiny:
        source = tiny_models.write_model(root / tiny, tiny, kind="BF16")
    elif name == "simulated":
        source = root / "script.txt"
        source.write_text("")
    else:
        source = request.getfixturevalue("first_layers_path")
    made = prepare_by(adapter, source, shared_store, shapes, weights)
    return dataclasses.replace(made, tier=int(tier or 0))


@pytest.fixture(scope="session")
def model(prepared) -> Iterator[LoadedModel]:
    loaded = load(prepared)
    yield loaded
    loaded.close()


@pytest.fixture(autouse=True)
def _all_free(request) -> Iterator[None]:
    """A test of the suite leaves nothing in the model that the next one uses."""
    yield
    if {"prepared", "model"} <= set(request.fixturenames):
        model = request.getfixturevalue("model")
        for slot in range(model.capabilities.slots):
            model.release(slot)
        assert model.free_blocks() == model.capabilities.total_blocks
