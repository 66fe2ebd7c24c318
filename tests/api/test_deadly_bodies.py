"""What a daemon that died was reading: counted by the next one, read alone, and refused after the second death."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.clock import SystemClock
from orchestrator.daemon.api import body_work
from orchestrator.daemon.api.app import create_app
from orchestrator.daemon.api.body_work import DeadlyBodies
from orchestrator.daemon.api.served import ServedTarget, TargetTerms
from orchestrator.errors import RequestError
from tests.api.support import _SANDBOX, HandClock, ScriptedControl, api_settings, serving
from tests.api.test_overload import Watched

WITHIN_S = 20.0
ROUTE = "/v1/completions"


class Daemons:
    """One daemon after the other over a directory; each dies while it reads some bodies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = HandClock()
        self.now = self._start()

    def _start(self) -> DeadlyBodies:
        found = DeadlyBodies(self.directory, self.clock, 3600.0)
        found.open()
        return found

    def die_over(self, *bodies: bytes) -> None:
        """Be killed: the files stay as they were while these were read."""
        with ExitStack() as reading:
            for number, body in enumerate(bodies):
                reading.enter_context(self.now.hold(ROUTE, body, f"req-{number}", WITHIN_S))
            left = {path: path.read_bytes() for path in self.directory.iterdir()}
        self.now.close()
        for path, data in left.items():
            path.write_bytes(data)
        self.now = self._start()

    def stop(self) -> None:
        self.now.close()
        self.now = self._start()

    def read(self, body: bytes) -> bool:
        """Whether a body is read to its end."""
        try:
            with self.now.hold(ROUTE, body, "req", WITHIN_S):
                return True
        except RequestError as error:
            return (error.status, error.code) != (422, "request_quarantined")


def test_the_second_death_in_a_row_convicts_until_it_is_over_or_an_operator_says_so(tmp_path):
    daemons = Daemons(tmp_path)
    daemons.die_over(b"deadly")
    assert daemons.now.list_quarantined() == []
    daemons.die_over(b"deadly")
    assert not daemons.read(b"deadly")
    assert daemons.read(b"other")
    (held,) = daemons.now.list_quarantined()
    assert (held.request_id, held.deaths, held.until_s - held.since_s) == ("req-0", 2, 3600.0)
    daemons.stop()
    assert not daemons.read(b"deadly"), "the next daemon knows"
    assert daemons.now.release([held.digest, "unknown"]) == [held.digest]
    assert daemons.read(b"deadly")
    daemons.stop()
    assert daemons.read(b"deadly")
    daemons.die_over(b"again")
    daemons.die_over(b"again")
    daemons.clock.now_s += 3601.0
    assert daemons.read(b"again")
    assert daemons.now.list_quarantined() == []


def test_what_went_well_once_in_between_is_innocent(tmp_path):
    daemons = Daemons(tmp_path)
    for _ in range(3):
        daemons.die_over(b"unlucky")
        assert daemons.read(b"unlucky")


def test_those_that_were_in_hand_together_are_told_apart(tmp_path):
    daemons = Daemons(tmp_path)
    daemons.die_over(b"innocent", b"deadly")
    begun, done = threading.Event(), threading.Event()
    order: list[bytes] = []

    def read(body: bytes) -> None:
        with daemons.now.hold(ROUTE, body, "req", WITHIN_S):
            order.append(body)
            begun.set()
            done.wait(WITHIN_S)

    threads = [threading.Thread(target=read, args=(body,)) for body in (b"deadly", b"innocent", b"other")]
    for one in threads:
        one.start()
        begun.wait(WITHIN_S)
    threads[1].join(0.2)
    assert order == [b"deadly"], "a suspect is read alone"
    done.set()
    for one in threads:
        one.join(WITHIN_S)
    assert sorted(order) == [b"deadly", b"innocent", b"other"]
    daemons.die_over(b"innocent", b"deadly")  # both had gone well
    assert daemons.now.list_quarantined() == []


def get_turn(daemon: DeadlyBodies, body: bytes, wait_s: float) -> tuple[int, str | None]:
    try:
        with daemon.hold(ROUTE, body, "req", wait_s):
            return 200, None
    except RequestError as error:
        return error.status, error.code if error.retry_after_s is not None else None


def test_nobody_waits_for_ever_for_a_body_that_is_read_alone(tmp_path):
    daemons = Daemons(tmp_path)
    daemons.die_over(b"suspect", b"another")
    missed = (429, "translation_timeout")
    with daemons.now.hold(ROUTE, b"suspect", "req", WITHIN_S):
        began_s = time.monotonic()
        assert [get_turn(daemons.now, body, 0.2) for body in (b"other", b"another")] == [missed] * 2
        assert time.monotonic() - began_s < WITHIN_S / 2
    assert get_turn(daemons.now, b"other", 0.2) == (200, None)
    with daemons.now.hold(ROUTE, b"other", "req", WITHIN_S):
        assert get_turn(daemons.now, b"another", 0.2) == missed, "a suspect does not wait for ever either"
        assert get_turn(daemons.now, b"third", 0.2) == (200, None), "and lets others go when it has given up"
    assert get_turn(daemons.now, b"another", 0.2) == (200, None)


async def test_bodies_behind_a_suspect_may_be_sent_again_and_are_not_too_large(tmp_path):
    tokenizer = Watched()
    daemons = Daemons(tmp_path)
    suspect, other = (json.dumps({"model": "toy", "prompt": text}).encode() for text in ("wait", "other"))
    daemons.die_over(suspect)
    target = ServedTarget(ScriptedControl(), lambda: tokenizer, lambda: "toy", TargetTerms())
    settings = api_settings(translation_timeout_s=2.0)
    app = create_app([target], settings, SystemClock(), sandbox=_SANDBOX, deadly=daemons.now)
    async with serving(app) as url, httpx.AsyncClient(timeout=60) as client:
        first = asyncio.create_task(client.post(url + ROUTE, content=suspect))
        await asyncio.to_thread(tokenizer.begun.wait, WITHIN_S)
        answers = await asyncio.gather(*(client.post(url + ROUTE, content=other) for _ in range(3)))
        assert [one.status_code for one in answers] == [429] * 3, [one.text for one in answers]
        assert {one.json()["error"]["code"] for one in answers} == {"translation_timeout"}
        assert all(int(one.headers["retry-after"]) >= 1 for one in answers)
        tokenizer.go.set()
        await first
        assert (await client.post(url + ROUTE, content=other)).status_code == 200


def test_a_loss_of_power_and_a_broken_record_blame_nobody(tmp_path, monkeypatch):
    daemons = Daemons(tmp_path)
    daemons.die_over(b"deadly")
    monkeypatch.setattr(body_work, "read_boot_id", lambda: "another boot")
    daemons.die_over(b"deadly")
    assert daemons.read(b"deadly")
    (tmp_path / "deaths.json").write_text("{")
    daemons.stop()
    assert daemons.read(b"deadly")


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    daemons = Daemons(tmp_path / "file" / "below")
    assert daemons.read(b"x")
    assert daemons.now.list_quarantined() == []


@settings(max_examples=50, deadline=None)
@given(deaths=st.lists(st.sets(st.sampled_from([b"a", b"b", b"c"]), max_size=1), max_size=6), data=st.data())
def test_only_what_two_daemons_died_over_without_a_success_between_is_refused(deaths, data, tmp_path_factory):
    daemons = Daemons(tmp_path_factory.mktemp("bodies"))
    in_a_row = dict.fromkeys([b"a", b"b", b"c"], 0)
    for bodies in deaths:
        if any(in_a_row[body] >= 2 for body in bodies):
            continue  # refused, so no daemon reads it
        daemons.die_over(*bodies)
        for body in bodies:
            in_a_row[body] += 1
        for body in data.draw(st.sets(st.sampled_from([b"a", b"b", b"c"]))):
            assert daemons.read(body) == (in_a_row[body] < 2)
            in_a_row[body] = in_a_row[body] if in_a_row[body] >= 2 else 0
    assert len(daemons.now.list_quarantined()) == sum(count >= 2 for count in in_a_row.values())


def test_more_at_once_than_there_are_notes_are_read_all_the_same(tmp_path):
    found = DeadlyBodies(tmp_path, HandClock(), 3600.0)
    found.open()
    with ExitStack() as reading:
        for number in range(100):
            reading.enter_context(found.hold(ROUTE, b"%d" % number, "é" * 400, WITHIN_S))
        assert (tmp_path / "in-hand").read_bytes().count(b"?" * 200) == 64
    assert not (tmp_path / "in-hand").read_bytes().replace(b"?", b"").strip(b"\0")
    found.close()
    found.close()
    assert not (tmp_path / "in-hand").exists()
