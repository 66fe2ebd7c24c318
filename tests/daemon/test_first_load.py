"""The first start with an empty store, through the daemon: the converter is stopped for a while, and killed."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from adapters.artefact import list_kept
from tests.support.converters import list_converters
from tests.support.daemon import running
from tests.support.waiting import until

_PARTS = 30


def disturb(store: Path) -> None:
    """Kill the converter in the middle."""
    until(lambda: any(len(path.read_text().splitlines()) > _PARTS for path in list_kept(store)))
    list_converters(store)[0].kill()


@pytest.mark.slow
def test_a_first_load_that_is_disturbed_goes_on_and_says_how_far_it_is(
    tmp_path: Path, default_model_path: Path
) -> None:
    config, store = tmp_path / "cluster.yaml", tmp_path / "store"
    config.write_text(
        f"model: {{source: '{default_model_path}', adapter: openvino_rt}}\n"
        "cluster: {runtime: local}\nlimits: {kv_cache: 64 MiB, max_running: 2}\n"
        f"api: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\nstore: {{directory: '{store}'}}\n"
        f"state: {{directory: '{tmp_path}/state'}}\njournal: {{reserve: 1 MiB}}\nlogging: {{format: json}}\n"
    )
    store.mkdir()
    disturber = threading.Thread(target=disturb, args=(store,))
    disturber.start()
    with running(config) as daemon:
        disturber.join()
        text = daemon.log.read_text()
        assert "was ended by SIGKILL" in text
        assert re.search(r"convert [^\"]*: [\d.]+ [KM]iB of [\d.]+ MiB", text)
        model = daemon.client.models.list().data[0].id
        assert daemon.client.completions.create(model=model, prompt="Once", max_tokens=4).choices
