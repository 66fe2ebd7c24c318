"""The conformance suite's models, cut into shards on one device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters import registry
from adapters.conformance.case import Case, Prepared, load, prepare_case
from adapters.conformance.fixtures import all_free as all_free
from adapters.conformance.fixtures import far as far
from adapters.conformance.fixtures import model as model
from adapters.contract import LoadedModel, LoadOptions, NumericalClass, Progress, cut_layers
from adapters.pipeline import PipelineModel
from device_profiles.profile import DeviceProfile, WeightsFormat
from orchestrator.worker.loading.pipeline import PipelineLoader, PlacedLayers
from tests.support import tiny_models
from tests.support.conformance import DEVICES
from tests.support.failing import poison

LAYERS = 4
OPENVINO, ONNX, TORCH, SIMULATED = ("openvino_rt",), ("onnx_rt",), ("torch_device",), ("simulated",)
CUTS = [
    pytest.param((SIMULATED, "", (1, 3)), id="simulated-2"),
    pytest.param((SIMULATED, "", (2, 1, 1)), id="simulated-3"),
    pytest.param((OPENVINO, "llama3", (3, 1)), id="openvino_rt-2"),
    pytest.param((OPENVINO, "gemma3", (1, 2, 1)), id="openvino_rt-gemma3-3"),
    pytest.param((ONNX, "llama3", (1, 3)), id="onnx_rt-2"),
    pytest.param((ONNX, "gemma3", (1, 2, 1)), id="onnx_rt-gemma3-3"),
    pytest.param((TORCH, "llama3", (3, 1)), id="torch_device-2"),
    pytest.param((TORCH, "gemma2", (1, 2, 1)), id="torch_device-gemma2-3"),
    pytest.param((TORCH, "gemma3", (1, 1, 2)), id="torch_device-gemma3-3"),
    pytest.param((OPENVINO + ONNX, "llama3", (2, 2)), id="openvino_rt-onnx_rt"),
    pytest.param((TORCH + OPENVINO + ONNX, "gemma3", (1, 2, 1)), id="torch_device-openvino_rt-onnx_rt-gemma3"),
]
Cut = tuple[tuple[str, ...], str, tuple[int, ...]]


class InShards:
    """An adapter whose models are loaded in layer shards, each by the next one of some adapters in turn, from what that
    one has prepared."""

    def __init__(self, parts: Sequence[Prepared], counts: Sequence[int]) -> None:
        self._parts, self._counts = parts, counts
        self._first = parts[0].adapter
        self.name = self._first.name

    def devices(self) -> list[DeviceProfile]:
        return self._first.devices()

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        return self._first.classes(options)

    def recipe(self, weights: WeightsFormat | None = None) -> str:
        return self._first.recipe(weights)

    def prepare(self, source: Path, target: Path, progress: Progress, weights: WeightsFormat | None = None) -> None:
        self._first.prepare(source, target, progress, weights)

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> LoadedModel:
        ranges = cut_layers(self._counts, LAYERS, "the model")
        parts = [
            PlacedLayers(part.adapter, options.device, 0, layers, part.path)
            for part, layers in zip(itertools.cycle(self._parts), ranges, strict=False)
        ]
        return PipelineLoader(parts).load(prepared, options, progress)


def poison_all(model: LoadedModel, slot: int) -> bool:
    """Poison behind what the shards were told before: their stages tell them later."""
    assert isinstance(model, PipelineModel)
    for stage in model._stages:
        told: Future[None] = Future()
        stage._queue(lambda told=told: told.set_result(None))  # type: ignore[misc]
        told.result()
    return all(poison(shard, slot) for shard in model.shards)


@pytest.fixture(scope="session", params=CUTS)
def cut(request: pytest.FixtureRequest) -> Cut:
    """Adapters, the model of tests/support/tiny_models.py, and how many layers each shard has."""
    found: Cut = request.param
    return found


@pytest.fixture(scope="session")
def case(cut: Cut, tmp_path_factory: pytest.TempPathFactory) -> Case:
    (name, *_), tiny, _ = cut
    root = tmp_path_factory.mktemp(name)
    shared: dict[str, Any] = {"adapter": name, "device": DEVICES[name], "poison": poison_all}
    if not tiny:
        source = root / "script.txt"
        source.write_text(f"layers={LAYERS}")
        return Case(source=source, damaged=b"layers=0", damage_told="layers must be 1 or more", **shared)
    return Case(source=tiny_models.write_model(root / tiny, tiny, kind="BF16", num_hidden_layers=LAYERS), **shared)


@pytest.fixture(scope="session")
def whole(case: Case, shared_store: Path) -> Prepared:
    """The model, to be loaded whole by the first of its adapters."""
    return prepare_case(case, registry.get(case.adapter), shared_store)


@pytest.fixture(scope="session")
def prepared(cut: Cut, case: Case, whole: Prepared, shared_store: Path) -> Prepared:
    """The same, to be loaded in shards."""
    names, _, counts = cut
    parts = [whole, *(prepare_case(case, registry.get(name), shared_store) for name in names[1:])]
    own = whole.path / f"{'+'.join(names)} {counts}"  # nothing reads it: each part has its own
    return replace(whole, adapter=InShards(parts, counts), path=own)


@pytest.fixture
def uncut(whole: Prepared, model: LoadedModel) -> Iterator[LoadedModel]:
    """The whole model, loaded in the class that its shards have."""
    loaded = load(whole, numerical_class=model.capabilities.numerical_class)
    yield loaded
    loaded.close()
