"""`outrider init --servers`: real llama-servers of a machine on which nothing else is, as a replica and as a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.setup.servers import list_urls
from tests.cli.test_init import write_model
from tests.support.conformance import NO_FORK
from tests.support.mac import a_mac


@pytest.mark.parametrize(
    ("place", "urls"),
    [
        ("mac:8080", ["http://mac:8080"]),
        ("https://mac.example/v1/", ["https://mac.example/v1"]),
        ("[fe80::1]:9000", ["http://[fe80::1]:9000"]),
        ("fe80::1", ["http://[fe80::1]:8080", "http://[fe80::1]:11434", "http://[fe80::1]:8000"]),
        ("mac", ["http://mac:8080", "http://mac:11434", "http://mac:8000"]),
    ],
)
def test_a_place_is_a_host_with_or_without_a_port_or_an_url(place: str, urls: list[str]) -> None:
    assert list_urls(place) == urls


@pytest.mark.parametrize("place", ["", "http://", "ma c:80", "mac:99999", "mac:port", "ftp://mac"])
def test_what_is_no_place_is_one_line(place: str, outrider: Any, home: Path) -> None:
    done = outrider("init", "--yes", "--servers", place)
    assert done.returncode == 1
    assert done.stderr.startswith(f"outrider: --servers {place}: ")
    assert "\n" not in done.stderr.rstrip("\n")


@NO_FORK
@pytest.mark.model
def test_servers_of_another_machine_are_a_replica_and_a_draft(
    outrider: Any,
    home: Path,
    default_model_path: Path,
    first_layers_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_model(home / "models" / "other.gguf", 1)
    with a_mac(home, default_model_path, first_layers_path, monkeypatch) as mac:
        places = ("--servers", mac.plain.removeprefix("http://"), "--servers", mac.secure)
        models = ("--models", default_model_path, "--models", home / "models")

        def run(*more: object) -> Any:
            return mac.hosts.on_near(lambda: outrider("init", "--yes", *models, *places, *more))

        keyless = run("--output", home / "keyless.yaml", "--model", "other.gguf")
        assert keyless.returncode == 0, keyless.stderr
        assert "Invalid API Key" in keyless.stdout
        assert set(yaml.safe_load((home / "keyless.yaml").read_text())) == {"model"}, "nothing there is of its model"
        done = run("--server-key-file", mac.key, "--model", default_model_path.name)
        assert done.returncode == 0, done.stderr
        written = yaml.safe_load((home / "cluster.yaml").read_text())
        own, theirs = written["model"]["replicas"]
        assert (own, theirs) == ({}, {"endpoint": mac.plain, "api_key_file": str(mac.key)})
        draft = {"method": "model", "endpoint": mac.secure, "api_key_file": str(mac.key)}
        assert written["drafts"] == [{"method": "suffix"}, draft]
