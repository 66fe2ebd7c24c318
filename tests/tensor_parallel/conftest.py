"""The conformance suite's model, split over two ranks: this process and one that it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapters import registry
from adapters.conformance.case import Case, Prepared, prepare_case
from adapters.conformance.fixtures import all_free as all_free
from adapters.conformance.fixtures import far as far
from adapters.conformance.fixtures import model as model
from adapters.contract import LoadedModel, LoadOptions, Progress
from adapters.torch_device.adapter import TorchAdapter
from adapters.torch_device.model import TorchModel
from adapters.torch_device.ranks import SplitMemory
from tests.support import tiny_models

RANKS = 2


class Split(TorchAdapter):
    """torch, whose models are loaded over ranks, from what `whole` has prepared."""

    def __init__(self, ranks: int, whole: Path) -> None:
        self._ranks, self._whole = ranks, whole

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> TorchModel:
        return super().load(self._whole, replace(options, threads=1, tensor_parallel=self._ranks), progress)


def poison_all(model: LoadedModel, slot: int) -> bool:
    """Fill a slot's blocks with NaN, on all ranks."""
    assert isinstance(model, TorchModel)
    assert isinstance(model._memory, SplitMemory)
    blocks = model._pool.table(slot, model.count_cached_positions(slot))
    for cache, length in enumerate(model.kv_layout.page_bytes):
        model._memory.write_blocks(cache, blocks, torch.full((len(blocks) * length,), 0xFF, dtype=torch.uint8))
    return True


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    source = tiny_models.write_model(tmp_path_factory.mktemp("tiny") / "llama3", "llama3", kind="BF16")
    return Case(adapter="torch_device", device="CPU", source=source, poison=poison_all, kv_cache_bytes=64 << 20)


@pytest.fixture(scope="session")
def whole(case: Case, shared_store: Path) -> Prepared:
    """The model, to be loaded whole."""
    return prepare_case(case, registry.get(case.adapter), shared_store)


@pytest.fixture(scope="session")
def prepared(whole: Prepared) -> Prepared:
    """The same, to be loaded over ranks."""
    own = whole.path / f"{RANKS} ranks"  # nothing reads it: by it the suite knows which class keeps its bits
    return replace(whole, adapter=Split(RANKS, whole.path), path=own)
