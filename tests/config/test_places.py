"""Where the admin socket and the store are: by configuration, by systemd, by user; never where others can reach."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from orchestrator.config.load import admin_socket_path, state_directory, store_directory
from orchestrator.errors import ConfigError
from tests.support.config import parse_config

TOY = "model: {source: 'simulated:toy', adapter: simulated}\n"


def configure(text: str = ""):
    return parse_config(TOY + text, Path("c.yaml"))


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    """A user without a runtime directory; returns what would be made for it."""
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", "CACHE_DIRECTORY", "XDG_CACHE_HOME", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"outrider-{os.getuid()}"


def test_the_socket_is_where_the_configuration_or_systemd_or_the_session_says(bare, monkeypatch):
    assert admin_socket_path(configure("api: {admin_socket: /x/y.sock}\n"), 1) == Path("/x/y.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert admin_socket_path(configure(), 81) == Path("/run/user/7/outrider-81.sock")
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/outrider:/run/other")
    assert admin_socket_path(configure(), 81) == Path("/run/outrider/outrider-81.sock")
    assert not bare.exists()


def test_without_a_runtime_directory_a_private_one_is_made_and_used_again(bare):
    assert admin_socket_path(configure(), 81) == admin_socket_path(configure(), 81) == bare / "outrider-81.sock"
    assert stat.S_IMODE(bare.stat().st_mode) == 0o700


def _open_to_others(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def _link_elsewhere(place: Path) -> None:
    (place.parent / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(place.parent / "elsewhere")


@pytest.mark.parametrize("trap", [_open_to_others, _link_elsewhere, Path.touch])
def test_what_somebody_else_may_have_put_there_is_not_used(bare, trap):
    trap(bare)
    with pytest.raises(ConfigError, match=r"api\.admin_socket") as caught:
        admin_socket_path(configure(), 81)
    assert str(bare) in str(caught.value)


def test_the_store_is_where_the_configuration_or_systemd_or_the_user_keeps_caches(bare, monkeypatch):
    assert store_directory(configure("store: {directory: /x}\n")) == Path("/x")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/u/.cache")
    assert store_directory(configure()) == Path("/home/u/.cache/outrider")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/outrider:/other")
    assert store_directory(configure()) == Path("/var/cache/outrider")


def test_each_configuration_and_port_has_a_state_of_its_own(bare, monkeypatch):
    assert state_directory(configure("state: {directory: /x}\n"), Path("c.yaml")) == Path("/x")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/u/.state")
    places = [
        state_directory(configure(), Path("c.yaml")),
        state_directory(configure(), Path("other.yaml")),
        state_directory(configure("api: {port: 81}\n"), Path("c.yaml")),
    ]
    assert len(set(places)) == 3
    assert {place.parent for place in places} == {Path("/home/u/.state/outrider")}
    assert state_directory(configure(), Path("c.yaml")) == places[0]
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/outrider:/other")
    assert state_directory(configure(), Path("c.yaml")) == Path("/var/lib/outrider") / places[0].name
