"""What the tests of the suite are given. All of it follows from `case`, which the author's own file defines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters import registry
from adapters.conformance.case import Case, Prepared, load, prepare_case
from adapters.contract import LoadedModel

__all__ = ["all_free", "conformance_store", "far", "model", "prepared"]


@pytest.fixture(scope="session")
def conformance_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are prepared."""
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture(scope="session")
def prepared(case: Case, conformance_store: Path) -> Prepared:
    """A model that the adapter has prepared."""
    return prepare_case(case, registry.get_for(case.adapter, case.device, case.static), conformance_store)


@pytest.fixture(scope="session")
def model(prepared: Prepared) -> Iterator[LoadedModel]:
    """The same, loaded."""
    loaded = load(prepared)
    yield loaded
    loaded.close()


@pytest.fixture
def far(model: LoadedModel) -> LoadedModel:
    """A model that is filled to the end of its context: another one may be quicker."""
    return model


@pytest.fixture(autouse=True)
def all_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of the suite leaves nothing in the model that the next one uses."""
    yield
    if {"prepared", "model"} <= set(request.fixturenames):
        model = request.getfixturevalue("model")
        for slot in range(model.capabilities.slots):
            model.release(slot)
        assert model.free_blocks() == model.capabilities.total_blocks
