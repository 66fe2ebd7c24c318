"""What `outrider init --servers` writes is served: by llama-servers of another machine, as a replica and as a draft."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.conformance import NO_FORK
from tests.support.daemon import Daemon, running
from tests.support.mac import Mac, a_mac
from tests.support.waiting import until

ASK: dict[str, Any] = {"prompt": "Count from one to twenty, in words.", "max_tokens": 24, "temperature": 0}


@NO_FORK
@pytest.mark.slow
def test_a_mac_computes_and_drafts_by_what_init_wrote(
    outrider: Any,
    home: Path,
    default_model_path: Path,
    first_layers_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = home / "cluster.yaml"
    with a_mac(home, default_model_path, first_layers_path, monkeypatch) as mac:
        places = ("--servers", mac.plain, "--servers", mac.secure, "--server-key-file", mac.key)
        model = ("--models", default_model_path, "--model", default_model_path.name)
        done = mac.hosts.on_near(lambda: outrider("init", "--yes", *model, *places))
        assert done.returncode == 0, done.stderr
        own = f"api: {{port: 0, admin_socket: '{home}/admin.sock'}}\njournal: {{reserve: 1 MiB}}\n"
        path.write_text(f"{path.read_text()}{own}cluster: {{runtime: local}}\n")

        def look() -> None:
            with running(path) as daemon:
                see_both(daemon, mac)

        mac.hosts.on_near(look)


def see_both(daemon: Daemon, mac: Mac) -> None:
    """See that the first server is a replica that answers, and that the second one drafts."""
    until(lambda: all(replica["phase"] == "ready" for replica in daemon.status()["replicas"]))
    assert mac.plain in str(daemon.status()["replicas"][1]["ready"])
    groups: set[str | None] = set()

    def has_asked_both() -> bool:
        with ThreadPoolExecutor(6) as pool:
            groups.update(pool.map(lambda _: ask(daemon), range(6)))
        return len(groups) > 1

    until(has_asked_both)
    until(lambda: is_drafting(daemon, mac.secure))


def ask(daemon: Daemon, **fields: Any) -> str | None:
    """Return the group that answered."""
    model = daemon.client.models.list().data[0].id
    return daemon.client.completions.create(model=model, **ASK, **fields).system_fingerprint


def is_drafting(daemon: Daemon, url: str) -> bool:
    ask(daemon, extra_body={"speculative_config": {"num_speculative_tokens": 4}})
    gauges = [replica["gauges"] or {} for replica in daemon.status()["replicas"]]
    drafters = [state for each in gauges for state in each.get("drafters", [])]
    return any(url in str(state) and state["state"] == "ok" for state in drafters)
