"""The compose file: what it mounts is there or said how to make, and the daemon takes its files and commands."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.load import parse_config

ROOT = Path(__file__).parents[2]
FILE = ROOT / "packaging" / "compose.yaml"
TEXT = FILE.read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
FRONT, WORKER = (COMPOSE["services"][name] for name in ("front", "worker"))


def test_each_file_is_shipped_or_its_making_is_told():
    for name, source in COMPOSE["secrets"].items():
        path = FILE.parent / source["file"]
        assert path.is_file() or f"\n#   {path.name} " in TEXT, name
    for service in (FRONT, WORKER):
        assert set(service["secrets"]) <= set(COMPOSE["secrets"])
        places = {volume.partition(":")[0] for volume in service["volumes"]}
        assert {place for place in places if not place.startswith("./")} <= set(COMPOSE["volumes"])
        assert all((FILE.parent / place).is_file() for place in places if place.startswith("./"))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f":{version}-cpu}}" in FRONT["image"]


def test_nobody_there_may_more_than_serving_needs():
    for service in (FRONT, WORKER):
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["shm_size"] == "1gb"
    assert all(port.startswith("127.0.0.1:") for port in FRONT["ports"])


def test_front_and_worker_meet_where_the_configuration_says(tmp_path, outrider):
    config, _ = parse_config((FILE.parent / "cluster.yaml").read_text(encoding="utf-8"), tmp_path / "cluster.yaml")
    address = FRONT["networks"]["cluster"]["ipv4_address"]
    assert config.cluster.address == f"{address}:6379"
    assert config.api.keys_file in {f"/run/secrets/{name}" for name in FRONT["secrets"]}
    assert WORKER["command"][:2] == ["join", address]
    for service in (FRONT, WORKER):
        name, *rest = service["command"]
        shown = outrider(name, "--help").stdout
        assert all(option in shown for option in rest if option.startswith("--"))
    token = FRONT["environment"]["RAY_AUTH_TOKEN_PATH"]
    assert token in WORKER["command"]
