"""The section `adapters`: a library that is not there is refused with its line, and one that is named is used."""

from __future__ import annotations

import os

import pytest

from adapters.libllama import VARIABLE
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError

MODEL = "model: {source: 'simulated:toy', adapter: simulated}\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a configuration with so much behind its model."""
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "cluster.yaml"

    def read(rest: str = ""):
        path.write_text(MODEL + rest, encoding="utf-8")
        return load_config(path)

    yield read
    read()


def test_a_library_that_is_not_there_is_refused_with_its_line(load, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*libllama\.so\. Name the libllama") as found:
        load("adapters:\n  llama_cpp:\n    library: libllama.so\n")
    assert str(found.value).startswith(f"{tmp_path}/cluster.yaml:4: adapters.llama_cpp.library:")
    assert VARIABLE not in os.environ


def test_a_library_is_used_as_long_as_the_configuration_names_it(load, tmp_path):
    (tmp_path / "libllama.so").touch()
    load("adapters: {llama_cpp: {library: libllama.so}}\n")
    assert os.environ[VARIABLE] == str(tmp_path / "libllama.so")
    load()
    assert VARIABLE not in os.environ


def test_what_the_environment_names_goes_before_the_configuration(load, tmp_path, monkeypatch):
    (tmp_path / "libllama.so").touch()
    monkeypatch.setenv(VARIABLE, "/own/libllama.so")
    load("adapters: {llama_cpp: {library: libllama.so}}\n")
    load("adapters: {llama_cpp: {library: none.so}}\n")
    assert os.environ[VARIABLE] == "/own/libllama.so"
