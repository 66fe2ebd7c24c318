"""Replicas that are other engines' servers, in cluster.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import load_text
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import ENDPOINT_ENTRY, engine_options, worker_specs

URL = "http://gpu-box:8000/v1"


def write(replica: str, model: str = "") -> str:
    return f"model:\n  source: simulated:toy\n  adapter: simulated{model}\n  replicas:\n    - {{}}\n    - {replica}\n"


def test_a_replica_with_an_endpoint_is_a_worker_that_asks_it(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-secretsecretsecret\n")
    key.chmod(0o600)
    text = write(f"{{endpoint: '{URL}', model: org/m, api_key_file: key, exactness: bit, max_running: 3}}")
    config = load_text(text, tmp_path / "cluster.yaml")
    own, endpoint = worker_specs(engine_options(config, tmp_path), config)
    assert own.options["model"] == endpoint.options["model"]
    assert (endpoint.entry, endpoint.device) == (ENDPOINT_ENTRY, URL)
    wanted = {"url": URL, "name": "org/m", "engine": "auto", "key_file": str(key), "exactness": "bit", "max_running": 3}
    assert endpoint.options.items() >= wanted.items()
    assert "secret" not in repr(endpoint)
    assert config.model.unlike


@pytest.mark.parametrize(
    ("replica", "model", "words"),
    [
        ("{endpoint: 'gpu-box:8000'}", "", r":6: model\.replicas\[1\]\.endpoint: is no URL of HTTP"),
        ("{endpoint: 'http://me:pw@gpu-box'}", "", r"\.endpoint: holds more than an address: .* api_key_file"),
        (f"{{endpoint: '{URL}', cores: [0]}}", "", r"\.cores: is of a worker that computes by itself"),
        (f"{{endpoint: '{URL}', adapter: simulated}}", "", r"\.adapter: is of a worker that computes by itself"),
        (f"{{endpoint: '{URL}', kv_cache: 1 GiB}}", "", r"\.kv_cache: is of a worker that computes by itself"),
        ("{model: m}", "", r"\.model: goes with endpoint"),
        (f"{{endpoint: '{URL}', api_key_file: nowhere}}", "", r"\.api_key_file: .*nowhere: No such file"),
        (f"{{endpoint: '{URL}', api_key_file: open.key}}", "", r"\.api_key_file: .*open to every user"),
        (f"{{endpoint: '{URL}', api_key_file: empty.key}}", "", r"\.api_key_file: .*one line of printable ASCII"),
        (f"{{endpoint: '{URL}'}}", "\n  alike: true", r"\.endpoint: has bits of its own, and model\.alike is true"),
        (f"{{endpoint: '{URL}'}}", "\n  device: auto", r"\.endpoint: goes with a target that says where it runs"),
        (f"{{endpoint: '{URL}', engine: vlm}}", "", r"\.engine: must be 'auto', 'vllm'"),
    ],
)
def test_what_contradicts_an_endpoint_is_refused_with_its_place(
    tmp_path: Path, replica: str, model: str, words: str
) -> None:
    for name, text in (("open.key", "sk-1\n"), ("empty.key", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "open.key").chmod(0o644)
    (tmp_path / "empty.key").chmod(0o600)
    with pytest.raises(ConfigError, match=words):
        load_text(write(replica, model), tmp_path / "cluster.yaml")
