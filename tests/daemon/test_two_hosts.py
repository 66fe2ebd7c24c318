"""The draft on another host: the cable between the two is cut in the middle of a stream."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.daemon.test_draft_workers import ASK, count_accepted, draft_of, own, text_while, until, until_it_drafts
from tests.daemon.test_life import collect
from tests.support.daemon import configuration, running
from tests.support.hosts import Hosts, ray_over, two_hosts

CUT_S = 1.0


@pytest.mark.ray
def test_a_cable_cut_or_a_draft_hung_in_a_stream_costs_no_token(tmp_path: Path, plain):
    expected = plain.client.completions.create(**ASK).choices[0].text
    with two_hosts() as hosts, ray_over(hosts):
        hosts.on_near(lambda: draft_over_the_cable(tmp_path, hosts, expected))


def draft_over_the_cable(directory: Path, hosts: Hosts, expected: str) -> None:
    extra = own(overlap="always", answer_timeout_s=0.5, host=hosts.far_ip)
    config = configuration(directory, script="base_ms=8", runtime="ray", extra=extra)
    config.write_text(config.read_text().replace("runtime: ray", f"runtime: ray, address: '{hosts.address}'"))
    with running(config) as daemon:
        until(lambda: draft_of(daemon)["phase"] == "ready", 60)
        draft = draft_of(daemon)
        assert hosts.far_ip in draft["worker"]
        assert hosts.near_ip in daemon.status()["worker"]
        assert draft["ready"]["door"][1].startswith(f"tcp:{hosts.far_ip}:")
        until_it_drafts(daemon, expected)
        pieces: list[str] = []
        started = threading.Event()
        stream = daemon.client.completions.create(**ASK, stream=True)
        reader = threading.Thread(target=collect, args=(stream, pieces, started))
        reader.start()
        assert started.wait(10)
        hosts.cable("down")
        time.sleep(CUT_S)
        before = count_accepted(daemon)
        hosts.cable("up")
        reader.join(60)
        assert "".join(pieces) == expected
        until_it_drafts(daemon, expected)
        assert count_accepted(daemon) > before
        assert daemon.status()["totals"]["restarts"] == 0
        assert draft_of(daemon)["restarts"] >= 1
        hung = draft_of(daemon)["ready"]["pid"]
        assert text_while(daemon, hung, signal.SIGSTOP) == expected
        until_it_drafts(daemon, expected)
        newest = draft_of(daemon)["ready"]["pid"]
        assert newest != hung
        assert not psutil.pid_exists(hung)  # Ray asks a process itself to end, and this one does not hear it
        assert daemon.stop() == 0
        assert not psutil.pid_exists(newest)
