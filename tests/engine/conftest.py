"""The default model, prepared and loaded once for all tests of the decode loop that need it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from adapters import registry
from adapters.conformance.case import exact_class
from adapters.contract import LoadedModel, LoadOptions, Precision, silent
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer

PROMPTS = Path(__file__).parents[2] / "tools" / "prompts.jsonl"


@pytest.fixture(scope="session")
def store(shared_store) -> ModelStore:
    return ModelStore(shared_store)


@pytest.fixture(scope="session")
def file(default_model_path) -> ModelSource:
    return ModelSource(default_model_path, "default", str(default_model_path))


@pytest.fixture(scope="session")
def model(store, file) -> Iterator[LoadedModel]:
    loaded = load("openvino_rt", store, file)
    yield loaded
    loaded.close()


@pytest.fixture(scope="session")
def layers_file(first_layers_path) -> ModelSource:
    """The default model's first layers: what depends on its shapes, its kernels and its vocabulary needs no more."""
    return ModelSource(first_layers_path, "default", str(first_layers_path))


@pytest.fixture(scope="session")
def layers_model(store, layers_file) -> Iterator[LoadedModel]:
    loaded = load("openvino_rt", store, layers_file)
    yield loaded
    loaded.close()


def load(
    runtime: str,
    store: ModelStore,
    file: ModelSource,
    *,
    kv_cache_bytes: int = 512 << 20,
    kv_cache: Precision | None = None,
) -> LoadedModel:
    """Return a model on a runtime."""
    adapter = registry.get(runtime)
    options = LoadOptions(slots=8, max_batch_rows=256, kv_cache_bytes=kv_cache_bytes, kv_cache=kv_cache)
    path = store.prepare(file, adapter, silent)
    return adapter.load(path, replace(options, numerical_class=exact_class(adapter, path, options)), silent)


@pytest.fixture(scope="session")
def tokenizer(store, file) -> Tokenizer:
    """The default model's tokenizer."""
    return Tokenizer.load(store.prepare(file, TokenizerRecipe(), silent))


@pytest.fixture(scope="session")
def prompts(tokenizer) -> list[list[int]]:
    texts = [json.loads(line)["turns"][0] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts[:8]]
