"""The keys `store` and `store_options`: what is no store, and what would change nothing, is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.clock import SystemClock
from orchestrator.config.load import load_config, load_text
from orchestrator.daemon.bootstrap.draft_store import build_draft_store
from orchestrator.errors import ConfigError

HEAD = "model:\n  source: simulated:toy\n  adapter: simulated\ncluster: {runtime: local}\n"
SUFFIX = HEAD + "drafts:\n  - method: suffix\n"

# (text behind SUFFIX, line, what the message must hold)
WRONG = [
    ("    store: postgres://a/b\n", 7, ["drafts[0].store: is none", "redis://HOST:PORT/DB"]),
    ("    store: redis:///0\n", 7, ["drafts[0].store: is none"]),
    ("    store: redis://a:99999/0\n", 7, ["drafts[0].store: is no address"]),
    ("    store: unix://\n", 7, ["drafts[0].store: is none"]),
    ("    store: 'disk:'\n", 7, ["drafts[0].store: is none", "'disk:PATH'"]),
    ("    store: redis://me:lamp-oil@a/0\n", 7, ["store: has a password", "store_options.password_file"]),
    ("    store: redis://a/0?password=lamp-oil\n", 7, ["has the parameter 'password'", "ssl_ca_certs"]),
    ("    store: redis://a/b\n", 7, ["store: names no database by its number"]),
    ("    store: redis://a?ssl_ca_certs=b\n", 7, ["which goes with rediss://"]),
    ("    store_options: {shared: true}\n", 7, ["drafts[0].store_options: goes with a store"]),
    (
        "    store: disk\n    store_options:\n      timeout_ms: 5\n",
        9,
        ["store_options.timeout_ms: goes with a store of"],
    ),
    (
        "    store: redis://a/0\n    store_options:\n      password_env: A\n      password_file: b\n",
        9,
        ["store_options.password_env: goes without password_file"],
    ),
    (
        "    store: redis://a/0\n    store_options:\n      password_file: none\n",
        9,
        ["store_options.password_file:", "none: No such file", "write Redis' password there"],
    ),
    ("    store: disk\n    store_options: {max_entries: 0}\n", 8, ["store_options.max_entries: must be 1 to 10000000"]),
    ("    store: disk\n  - method: suffix\n    store: disk\n", 9, ["drafts[1].store: a model has one store"]),
    (
        "canary:\n  share: 0.1\n  drafts:\n    - method: suffix\n      store: disk\n",
        11,
        ["canary.drafts[0].store: the canary has no store of its own"],
    ),
]


@pytest.mark.parametrize(("text", "line", "parts"), WRONG)
def test_what_is_wrong_is_told_with_its_line_and_without_a_password(tmp_path: Path, text, line, parts):
    path = tmp_path / "cluster.yaml"
    with pytest.raises(ConfigError) as refused:
        load_text(SUFFIX + text, path)
    told = str(refused.value)
    assert told.startswith(f"{path}:{line}: ")
    assert all(part in told for part in parts), told
    assert "lamp-oil" not in told
    assert "\n" not in told


def test_a_password_that_others_can_read_is_refused(tmp_path: Path):
    path, secret = tmp_path / "cluster.yaml", tmp_path / "secret"
    secret.write_text("lamp-oil\n")
    path.write_text(SUFFIX + "    store: rediss://me@a:6380/2\n    store_options: {password_file: secret}\n")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="is open to other users; chmod 600 it"):
        load_config(path)
    secret.chmod(0o600)
    service = build_draft_store(load_config(path), tmp_path, tmp_path, SystemClock())
    assert service is not None
    assert service.view().location == "rediss://a:6380/2"


def test_each_model_has_a_store_of_its_own_and_in_memory_means_none(tmp_path: Path):
    more = "    store: disk:of-a\nmodels:\n  - {source: 'simulated:toy', adapter: simulated, name: b}\n"
    config = load_text(SUFFIX.replace("model:\n", "model:\n  name: a\n") + more, tmp_path / "cluster.yaml")
    stores = [build_draft_store(one, tmp_path, tmp_path, SystemClock()) for one in config.targets]
    assert [one and one.view().location for one in stores] == [str(tmp_path / "of-a"), None]
