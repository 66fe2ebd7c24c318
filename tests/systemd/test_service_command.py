"""`outrider service`: what it writes, what it leaves alone, and what it takes away again."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from orchestrator.config.load import load_config
from orchestrator.daemon.systemd import files
from orchestrator.daemon.systemd.files import ServiceChoices, ServiceError, find_systemd_version, list_files
from orchestrator.daemon.systemd.install import enable_units, install_files, remove_service
from tests.support.daemon import outrider_process

COMMANDS = ServiceChoices(Path("/opt/outrider/bin"), model='hf:A/B "quoted"')
JOINS = dataclasses.replace(COMMANDS, front="10.0.0.1", token="a secret")  # noqa: S106 -- no cluster has it
WRITTEN = {
    "etc/systemd/system/outrider.service",
    "etc/systemd/system/outrider.socket",
    "etc/sysusers.d/outrider.conf",
    "etc/tmpfiles.d/outrider.conf",
    "etc/outrider/cluster.yaml",
}


def list_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_first_install_writes_all_files_and_a_second_one_changes_none(tmp_path):
    wanted = list_files(tmp_path, COMMANDS, systemd=252)
    assert {step.what for step in install_files(tmp_path, wanted)} == {"wrote"}
    assert list_below(tmp_path) == WRITTEN
    assert not any(re.search("@[A-Z_]+@", (tmp_path / name).read_text()) for name in WRITTEN)
    again = install_files(tmp_path, list_files(tmp_path, COMMANDS, systemd=252))
    assert {step.what for step in again} == {"unchanged", "kept as it is"}
    first = load_config(tmp_path / "etc/outrider/cluster.yaml", sources=False)
    assert first.model.source == COMMANDS.model
    assert first.api.admin_socket == "/run/outrider/admin.sock"
    assert (tmp_path / "etc/outrider/cluster.yaml").stat().st_mode & 0o777 == 0o640


def test_the_operators_configuration_stays_and_its_address_enters_the_socket_unit(tmp_path):
    config = tmp_path / "etc/outrider/cluster.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("model: {source: 'simulated:toy', adapter: simulated}\napi: {host: '::1', port: 9001}\n")
    install_files(tmp_path, list_files(tmp_path, COMMANDS, systemd=257))
    assert config.read_text().startswith("model: {source: 'simulated:toy'")
    unit = (tmp_path / "etc/systemd/system/outrider.socket").read_text()
    assert "ListenStream=[::1]:9001" in unit
    config.write_text(config.read_text().replace("9001", "9002"))
    told = {step.subject: step.what for step in install_files(tmp_path, list_files(tmp_path, COMMANDS, systemd=257))}
    assert told[str(tmp_path / "etc/systemd/system/outrider.socket")] == "replaced"
    assert "ListenStream=[::1]:9002" in (tmp_path / "etc/systemd/system/outrider.socket").read_text()


def test_commands_whose_python_the_unit_cannot_see_are_refused(tmp_path, monkeypatch):
    home, commands = tmp_path / "home" / "python3.11", tmp_path / "opt" / "bin"
    monkeypatch.setattr(files, "_HIDDEN", (str(tmp_path / "home"),))
    for directory in (home.parent, commands):
        directory.mkdir(parents=True)
    home.touch()
    (commands / "python3").symlink_to(home)
    (commands / "python").symlink_to("python3")
    with pytest.raises(ServiceError, match=f"python is {home}, below {home.parent}, which the service does not see"):
        list_files(Path("/"), ServiceChoices(commands))
    list_files(tmp_path, ServiceChoices(commands), systemd=252)  # an image has links of its own


def test_uninstall_leaves_what_is_the_operators_and_purge_does_not(tmp_path):
    install_files(tmp_path, list_files(tmp_path, ServiceChoices(Path("/opt/outrider/bin"), gpu=True), systemd=252))
    assert "etc/systemd/system/outrider.service.d/gpu.conf" in list_below(tmp_path)
    shutil.rmtree(tmp_path / "etc/systemd/system/multi-user.target.wants", ignore_errors=True)
    remove_service(tmp_path, purge=False)
    assert list_below(tmp_path) == {"etc/outrider/cluster.yaml"}
    assert not (tmp_path / "etc/systemd/system/outrider.service.d").exists()
    remove_service(tmp_path, purge=True)
    assert list_below(tmp_path) == set()


def test_a_place_that_the_unit_cannot_see_is_refused():
    with pytest.raises(ServiceError, match="python3 -m venv /opt/outrider"):
        list_files(Path("/nowhere"), ServiceChoices(Path("/home/me/venv/bin")), systemd=252)


def test_the_version_of_systemd_is_that_of_the_image(tmp_path):
    assert find_systemd_version(tmp_path) is None
    library = tmp_path / "usr/lib/x86_64-linux-gnu/systemd/libsystemd-shared-257.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert find_systemd_version(tmp_path) == 257


@pytest.mark.skipif(shutil.which("systemctl") is None, reason="needs systemctl")
@pytest.mark.parametrize(
    ("choices", "links"),
    [
        (COMMANDS, ["multi-user.target.wants/outrider.service", "sockets.target.wants/outrider.socket"]),
        (JOINS, ["multi-user.target.wants/outrider-join.service", "sleep.target.wants/outrider-join-sleep.service"]),
    ],
)
def test_an_image_has_its_units_enabled(tmp_path, choices, links):
    install_files(tmp_path, list_files(tmp_path, choices, systemd=252))
    enable_units(tmp_path, choices.units, start=True)
    wants = [tmp_path / "etc/systemd/system" / link for link in links]
    assert all(link.is_symlink() for link in wants)
    remove_service(tmp_path, purge=True)
    assert not any(link.is_symlink() for link in wants)


def test_a_host_that_joins_keeps_its_token_for_itself(tmp_path):
    root = ("--root", str(tmp_path / "image"), "--systemd", "252", "--commands", "/opt/outrider/bin")
    refused = outrider_process("service", "show", *root, "--join", "10.0.0.1")
    assert refused.returncode == 1
    assert "--token-file FILE" in refused.stderr
    (tmp_path / "token").write_text("a secret\n")
    named = ("--join", "10.0.0.1", "--token-file", str(tmp_path / "token"))
    shown = json.loads(outrider_process("service", "show", *root, *named, "--json").stdout)["files"]
    texts = {file["path"]: file["text"] for file in shown}
    assert "a secret" not in str(texts)
    line = "/opt/outrider/bin/outrider join 10.0.0.1 --token-file /etc/outrider/ray_token"
    assert line in texts["/etc/systemd/system/outrider-join.service"]
    assert "/etc/systemd/system/outrider.service" not in texts
    install_files(tmp_path, list_files(tmp_path, JOINS, systemd=252))
    token = tmp_path / "etc/outrider/ray_token"
    assert token.read_text() == "a secret\n"
    assert token.stat().st_mode & 0o777 == 0o640
    install_files(tmp_path, list_files(tmp_path, dataclasses.replace(JOINS, token=""), systemd=252))
    assert token.read_text() == "a secret\n", "a later install needs it no more"


def test_the_command_asks_shows_and_says_what_it_did(tmp_path):
    root = ("--root", str(tmp_path), "--systemd", "252", "--commands", "/opt/outrider/bin")
    asked = outrider_process("service", "install", *root)
    assert asked.returncode == 1
    assert "Say --yes" in asked.stderr
    assert list_below(tmp_path) == set()
    shown = json.loads(outrider_process("service", "show", *root, "--json").stdout)
    assert {one["standing"] for one in shown["files"]} == {"new"}
    if shutil.which("systemctl") is None:
        return
    done = outrider_process("service", "install", *root, "--yes", "--json", "--model", "simulated:toy")
    assert done.returncode == 0, done.stderr
    assert {step["what"] for step in json.loads(done.stdout)["done"]} == {"wrote", "ran"}
    assert yaml.safe_load((tmp_path / "etc/outrider/cluster.yaml").read_text())["model"]["source"] == "simulated:toy"
    assert outrider_process("service", "uninstall", "--root", str(tmp_path), "--yes").returncode == 0
    assert "etc/systemd/system/outrider.service" not in list_below(tmp_path)


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="needs systemd-sysusers")
def test_the_user_is_made_from_the_file(tmp_path):
    install_files(tmp_path, list_files(tmp_path, COMMANDS, systemd=252))
    told = subprocess.run(
        ["systemd-sysusers", "--dry-run", f"--root={tmp_path}", "--cat-config"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "u outrider" in told.stdout
