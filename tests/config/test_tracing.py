"""The section `tracing`: what it refuses, and how the headers of the receiver are read."""

from __future__ import annotations

import pytest

from orchestrator.config.load import load_config
from orchestrator.config.tracing import read_headers_file
from orchestrator.errors import ConfigError

MODEL = "model: {source: 'simulated:toy', adapter: simulated}\n"


def load(tmp_path, section: str):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{MODEL}tracing: {{{section}}}\n", encoding="utf-8")
    return load_config(path).tracing


def test_an_endpoint_loses_its_last_slash(tmp_path):
    assert load(tmp_path, "endpoint: 'https://[::1]:4318/otlp/'").endpoint == "https://[::1]:4318/otlp"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("endpoint: 'localhost:4318'", "is no URL of a receiver"),
        ("endpoint: 'http://'", "is no URL of a receiver"),
        ("endpoint: 'http://h:99999'", "is no URL of a receiver"),
        ("endpoint: 'http://h/?key=1'", "is no URL of a receiver"),
        ("endpoint: 'http://me:word@h'", "headers_file"),
        ("endpoint: 'http://h', sample_rounds: 1.5", "tracing.sample_rounds"),
        ("sample_rounds: 0.5", r"tracing.sample_rounds: goes with tracing.endpoint"),
        ("endpoint: 'http://h', headers_file: none", "none: No such file.*leave headers_file out"),
    ],
)
def test_what_cannot_work_is_refused_with_its_line(tmp_path, section, said):
    with pytest.raises(ConfigError, match=said) as found:
        load(tmp_path, section)
    assert str(found.value).startswith(f"{tmp_path}/cluster.yaml:2: tracing.")
    assert "word" not in str(found.value).replace("password", "")


def test_headers_are_read(tmp_path):
    path = tmp_path / "headers"
    path.write_text("# mine\n\nAuthorization: Bearer a b\nX-Tenant:one\n", encoding="ascii")
    path.chmod(0o600)
    assert read_headers_file(path) == {"Authorization": "Bearer a b", "X-Tenant": "one"}


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("Authorization: hidden\n", 0o604, "is open to every user"),
        ("A: b\nhidden\n", 0o600, ":2: is no header"),
        ("A: hiddén\n", 0o600, "is no ASCII text"),
        ("A: hidden\x01\n", 0o600, ":1: is no header"),
    ],
)
def test_headers_that_cannot_be_used_are_refused_and_not_told(tmp_path, text, mode, said):
    path = tmp_path / "headers"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=said) as found:
        read_headers_file(path)
    assert "hidd" not in str(found.value)
