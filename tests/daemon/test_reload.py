"""Live reload of a real daemon: every kind of change takes effect while streams of a real client run through it."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from orchestrator.cli.daemon_socket import StatusError, query_daemon
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.profiles import store_simulated_profiles
from tests.support.waiting import until

PROMPT = "the same words again and again and the same words again and again and"
TOKENS = 150
LIMITS = {"max_running": 2}


@dataclass
class Flow:
    """Streams that follow one another. `whole`: texts of those that ended; `pieces` that have come; `lost`: how others
    ended."""

    daemon: Daemon
    whole: list[str] = field(default_factory=list)
    pieces: int = 0
    lost: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Ask for one stream after the other."""
        while not self.over.is_set():
            try:
                self.whole.append("".join(self.ask()))
            except openai.APIError as error:
                self.lost.append(repr(error))

    def ask(self) -> Iterator[str]:
        """Yield the pieces of one stream."""
        asked: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        finish = None
        for event in self.daemon.client.completions.create(**asked, stream=True):
            self.pieces += 1
            finish = event.choices[0].finish_reason or finish
            yield event.choices[0].text
        if finish != "length":
            self.lost.append(f"ended with {finish}")

    def wait_pieces(self, more: int = 5) -> None:
        """Wait until so many more pieces have come."""
        wanted = self.pieces + more
        until(lambda: self.pieces >= wanted, what="streams go on")


@dataclass
class Server:
    """The daemon of this module, and its file. `changed` keeps the file's parts."""

    daemon: Daemon
    path: Path
    parts: dict[str, Any]
    text: str

    def write(self, **sections: Any) -> None:
        """Write the file with these sections beside those that it began with."""
        written = {**self.parts, **sections}
        self.path.write_text(self.text + "".join(f"{key}: {json.dumps(one)}\n" for key, one in written.items()))

    def reload(self, *, check: bool = False, **sections: Any) -> dict[str, str]:
        """Write the file, and reload; returns the changed keys, with how each took effect. Raises StatusError."""
        self.write(**sections)
        found = query_daemon(self.daemon.admin, "/admin/reload", {"check": check}, answer_s=120.0)
        return {one["key"]: one["effect"] for one in found["changes"]}

    @contextmanager
    def flowing(self, streams: int = 2) -> Iterator[Flow]:
        """Let streams run; none may be lost, and all have to say the same."""
        flow = Flow(self.daemon)
        threads = [threading.Thread(target=flow.run) for _ in range(streams)]
        for thread in threads:
            thread.start()
        try:
            flow.wait_pieces()
            yield flow
            flow.wait_pieces()
        finally:
            flow.over.set()
            for thread in threads:
                thread.join()
        assert flow.lost == []
        assert flow.whole
        assert set(flow.whole) == {self.expected}

    @property
    def expected(self) -> str:
        """What every stream says: the toy's text depends on the prompt alone."""
        if not hasattr(self, "_expected"):
            self._expected = "".join(Flow(self.daemon).ask())
        return self._expected

    def complete(self, tokens: int = 8, prompt: str = PROMPT, **more: Any) -> Any:
        """Ask for one answer."""
        return self.daemon.client.completions.create(
            model="toy", prompt=prompt, max_tokens=tokens, temperature=0, **more
        )

    def pids(self) -> list[int]:
        """The processes of the replicas."""
        return [one["ready"]["pid"] for one in self.daemon.status()["replicas"]]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = configuration(tmp_path_factory.mktemp("reload"), script="base_ms=6", replicas="2")
    text = path.read_text().replace("logging: {format: json}\n", "").replace("journal: {reserve: 1 MiB}\n", "")
    parts = {
        "logging": {"format": "json"},
        "journal": {"reserve": "1 MiB"},
        "limits": LIMITS,
        "drafts": [],
        "speculation": {"method": "fixed", "num_speculative_tokens": 2},
    }
    path.write_text(text + "".join(f"{key}: {json.dumps(one)}\n" for key, one in parts.items()))
    with running(path) as daemon:
        server = Server(daemon, path, parts, text)
        assert server.expected
        yield server


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    """The daemon, which runs what it began with before and after each test."""
    yield started
    started.reload()
    assert started.daemon.process.poll() is None


def test_bounds_of_requests_hold_at_once(server: Server) -> None:
    with server.flowing(4) as flow:
        extra = threading.Thread(target=server.complete)
        extra.start()  # it waits for a place
        extra.join()
        assert server.reload(limits={**LIMITS, "max_waiting": 0}) == {"limits.max_waiting": "live"}
        until(lambda: server.daemon.status()["streams"] == 4, what="all places are taken")
        refused: list[str] = []
        for _ in range(20):  # now and then one of the four has just ended
            try:
                server.complete(1)
            except openai.RateLimitError as error:
                refused.append(str(error))
                break
        assert "the queue is full" in refused[0]
        server.reload()
        flow.lost = [one for one in flow.lost if "the queue is full" not in one]  # what our own request displaced
    server.reload(limits={**LIMITS, "max_body": "1 KiB"})
    with pytest.raises(openai.APIStatusError) as large:
        server.complete(prompt="x" * 2000)
    assert large.value.status_code == 413
    server.reload(limits={**LIMITS, "request_timeout_s": 1.0})
    assert server.complete(500).usage.completion_tokens < 500
    server.reload()
    assert server.complete().usage.completion_tokens == 8


def test_depth_and_method_change_in_live_workers(server: Server) -> None:
    draft = [{"method": "model", "source": "simulated:toy", "adapter": "simulated"}]
    before = server.pids()

    def count_drafts() -> tuple[int, int]:
        """Drafts, and the deepest that was accepted, of an answer."""
        old = server.daemon.status()["totals"]
        server.complete(40)
        new = server.daemon.status()["totals"]
        accepted = new["accepted_per_position"]
        was = [*old["accepted_per_position"], *([0] * len(accepted))]
        deepest = max((depth + 1 for depth, count in enumerate(accepted) if count > was[depth]), default=0)
        return new["drafts"] - old["drafts"], deepest

    with server.flowing() as flow:
        assert count_drafts() == (0, 0)
        assert server.reload(drafts=draft) == {"drafts": "drafts"}
        flow.wait_pieces()
    assert count_drafts()[1] == 2
    changed = server.reload(drafts=draft, speculation={"method": "fixed", "num_speculative_tokens": 6})
    assert changed == {"speculation.num_speculative_tokens": "live"}
    assert count_drafts()[1] == 6
    server.reload(drafts=draft, speculation={"method": "off"})
    assert count_drafts() == (0, 0)
    assert server.pids() == before


def test_drafts_are_swapped_under_streams(server: Server) -> None:
    suffix = {"method": "suffix", "max_match": 8}
    model = {"method": "model", "source": "simulated:toy", "adapter": "simulated"}
    before = server.pids()

    def names() -> set[str]:
        return {one["name"] for one in server.daemon.status()["gauges"]["drafters"] if one["state"] == "ok"}

    with server.flowing() as flow:
        server.reload(drafts=[suffix])
        until(lambda: names() == {"suffix"}, what="the suffix drafter is there")
        flow.wait_pieces()
        server.reload(drafts=[suffix, {**model, "process": "own"}])
        until(lambda: names() == {"suffix", "model"}, what="the draft worker is connected")
        ready = ["ready", "ready"]
        until(lambda: [one["phase"] for one in server.daemon.status()["drafts"]] == ready, what="both are ready")
        flow.wait_pieces(20)
        drafted = server.daemon.status()["totals"]["by_drafter"]
        assert drafted.get("model", {}).get("accepted", 0) + drafted.get("suffix", {}).get("accepted", 0) > 0
        server.reload(drafts=[])
        until(lambda: names() == set() and not server.daemon.status()["drafts"], what="no drafter is left")
        flow.wait_pieces()
    assert server.pids() == before


def test_weights_change_the_price_of_a_replica(server: Server) -> None:
    def find_terms() -> dict[str, float]:
        answer = server.complete(20)
        (route,) = query_daemon(server.daemon.admin, f"/admin/explain/{answer.id}")["routes"]
        return {one["name"]: one["cost_ms"] for one in route["rated"][0]["terms"]}

    server.complete(20)
    assert find_terms()["tpot"] > 0.0
    changed = server.reload(routing={"weights": {"tpot": 0}})
    assert changed == {"routing.weights.tpot": "live"}
    assert find_terms().get("tpot", 0.0) == 0.0
    server.reload()
    assert find_terms()["tpot"] > 0.0


def test_the_target_is_rolled_over_one_replica_after_the_other(server: Server) -> None:
    before = server.pids()
    changed_log = server.daemon.log.stat().st_size
    with server.flowing(3) as flow:
        found = server.reload(limits={**LIMITS, "kv_cache": "96 MiB"}, routing={"hysteresis": 0.2})
        assert found == {"limits.kv_cache": "roll", "routing.hysteresis": "live"}
        flow.wait_pieces()
    after = server.pids()
    assert len(after) == 2
    assert not set(after) & set(before)
    log = server.daemon.log.read_text()[changed_log:]
    assert "2 target workers are started beside the 2 that serve, one after the other" in log
    assert log.count("takes the place of") == 2


def test_a_bad_file_changes_nothing_and_says_where(server: Server) -> None:
    values = query_daemon(server.daemon.admin, "/admin/configuration")
    before = server.pids()
    with server.flowing():
        server.write(limits={**LIMITS, "max_waitin": 3}, routing={"hysteresis": 0.3})
        told = outrider_process("reload", "--socket", str(server.daemon.admin))
        assert told.returncode == 1
        assert f"{server.path}:" in told.stderr
        assert "limits.max_waitin: unknown key; did you mean 'max_waiting'?" in told.stderr
        assert "nothing has changed" in told.stderr
        assert "Traceback" not in told.stderr
        server.path.write_text("model: {source: [\n")
        with pytest.raises(StatusError, match=rf"{server.path}:\d+: is not YAML"):
            query_daemon(server.daemon.admin, "/admin/reload", {})
        server.path.unlink()
        with pytest.raises(StatusError, match="cannot be read: No such file"):
            query_daemon(server.daemon.admin, "/admin/reload", {})
    assert query_daemon(server.daemon.admin, "/admin/configuration") == values
    assert server.pids() == before


def test_drafts_that_no_worker_can_load_leave_everything_as_it_was(server: Server) -> None:
    values = query_daemon(server.daemon.admin, "/admin/configuration")
    broken = {"method": "model", "source": "simulated:toy?nonsense=1", "adapter": "simulated"}
    with server.flowing() as flow:
        with pytest.raises(StatusError, match=r"nothing has changed: .*nonsense"):
            server.reload(drafts=[broken], routing={"hysteresis": 0.3})
        flow.wait_pieces()
    assert query_daemon(server.daemon.admin, "/admin/configuration") == values


def test_a_target_that_cannot_be_loaded_leaves_everything_as_it_was(server: Server) -> None:
    values, before = query_daemon(server.daemon.admin, "/admin/configuration"), server.pids()
    with server.flowing() as flow:
        with pytest.raises(StatusError, match="nothing has changed: "):
            server.reload(limits={**LIMITS, "kv_cache": "1 B"})
        flow.wait_pieces()
    assert query_daemon(server.daemon.admin, "/admin/configuration") == values
    assert server.pids() == before


def test_a_hangup_reloads_and_the_log_says_what_came_of_it(server: Server) -> None:
    with server.flowing():
        server.write(limits={**LIMITS, "max_body": "3 KiB"})
        server.daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "limits.max_body: 8 MiB -> 3 KiB (live)" in server.daemon.log.read_text(), what="the log says it")
        with pytest.raises(openai.APIStatusError):
            server.complete(prompt="x" * 4000)
        server.write(limits={**LIMITS, "max_body": 3})
        server.daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "limits.max_body: needs a unit" in server.daemon.log.read_text(), what="the log says why not")
        assert "Traceback" not in server.daemon.log.read_text()


def test_what_needs_a_restart_waits_for_it_and_the_rest_does_not(server: Server) -> None:
    server.write(limits={**LIMITS, "max_body": "1 KiB"}, journal={"ended_s": 5, "reserve": "1 MiB"})
    told = outrider_process("reload", "--socket", str(server.daemon.admin))
    assert told.returncode == 0, told.stderr
    assert "1 change took effect" in told.stdout
    assert "1 change waits for a restart of the daemon" in told.stdout
    (waiting,) = server.daemon.status()["reload"]["waiting"]
    assert (waiting["key"], waiting["before"], waiting["after"]) == ("journal.ended_s", "60.0", "5.0")
    with pytest.raises(openai.APIStatusError):
        server.complete(prompt="x" * 2000)
    server.reload()
    assert server.daemon.status()["reload"]["waiting"] == []


def test_a_check_says_what_would_change_and_changes_nothing(server: Server) -> None:
    before = server.pids()
    found = server.reload(check=True, limits={**LIMITS, "max_body": "1 KiB", "kv_cache": "32 MiB"})
    assert found == {"limits.max_body": "live", "limits.kv_cache": "roll"}
    told = outrider_process("reload", "--check", "--socket", str(server.daemon.admin))
    assert "2 target workers are started beside the 2 that serve" in told.stdout
    assert "nothing has changed yet. Next: outrider reload" in told.stdout
    assert server.complete(prompt="x" * 2000).usage.prompt_tokens > 0
    assert server.pids() == before


def test_reloads_at_once_follow_one_another(server: Server) -> None:
    server.write(drafts=[{"method": "suffix"}])
    answers: list[int] = []

    def reload() -> None:
        found = query_daemon(server.daemon.admin, "/admin/reload", {}, answer_s=120.0)
        answers.append(len(found["changes"]))

    with server.flowing():
        threads = [threading.Thread(target=reload) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [0, 0, 1]


def test_objectives_reuse_and_the_log_level_hold_at_once(server: Server) -> None:
    def count_hits() -> int:
        before = server.daemon.status()["gauges"]["prefix_hits"]
        server.complete(2, prompt=PROMPT * 6)
        server.complete(2, prompt=PROMPT * 6)
        return int(server.daemon.status()["gauges"]["prefix_hits"]) - before

    until(lambda: count_hits() > 0, what="prompts are reused")
    server.reload(
        limits={**LIMITS, "prefix_reuse": False}, slo={"ttft_ms": 500}, logging={"format": "json", "level": "error"}
    )
    assert server.daemon.status()["slo"]["objectives"]["ttft"]["ms"] == 500.0
    until(
        lambda: all(one["gauges"]["slo"] is not None for one in server.daemon.status()["replicas"]),
        what="all replicas tell how they keep the objectives",
    )
    page = httpx.get(f"{server.daemon.url}/metrics").text
    assert 'outrider_slo_objective_seconds{engine="0",model_name="toy",objective="ttft"} 0.5' in page
    until(lambda: count_hits() == 0, what="no prompt is reused")
    server.reload()
    assert server.daemon.status()["slo"] is None


def test_the_effective_values_say_where_they_came_from_and_what_runs_instead(server: Server) -> None:
    server.write(limits={**LIMITS, "max_waiting": 9})
    shown = outrider_process("config", "show", str(server.path), "--effective", "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    by_key = {one["key"]: one for one in found["values"]}
    line = 1 + next(at for at, text in enumerate(server.path.read_text().splitlines()) if "max_waiting" in text)
    assert found["daemon"]
    assert by_key["limits.max_waiting"] == {
        "key": "limits.max_waiting",
        "value": "9",
        "origin": f"{server.path}:{line}",
        "running": "256",
    }
    assert by_key["limits.max_body"]["origin"] == "default"
    assert [key for key, one in by_key.items() if one["running"] is not None] == ["limits.max_waiting"]
    told = outrider_process("config", "show", str(server.path), "--effective")
    assert "1 values differ from those that run" in told.stdout


def test_a_plan_is_made_anew_and_its_change_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    script = "base_ms=4&other_ms=5"
    store_simulated_profiles(tmp_path / "store" / "profiles", {"SIM": 4.0, "SIM.1": 6.0}, script=script)
    path = configuration(tmp_path, script=script)
    text = path.read_text().replace("adapter: simulated", "adapter: auto, device: auto", 1)
    path.write_text(text + "placement: {profile: never, drift_tolerance: 9}\n")
    with running(path) as daemon:
        assert daemon.status()["ready"]["device"] == "SIM"
        flow = Flow(daemon)
        expected = "".join(flow.ask())
        thread = threading.Thread(target=flow.run)
        thread.start()
        flow.wait_pieces()
        path.write_text(text + "placement: {profile: never, drift_tolerance: 9, exclude: [here/SIM]}\n")
        checked = query_daemon(daemon.admin, "/admin/reload", {"check": True}, answer_s=120.0)
        told = "\n".join(checked["workers"][0]["told"])
        assert "here/SIM.1" in told
        assert "tokens/s predicted" in told
        assert daemon.status()["ready"]["device"] == "SIM"
        query_daemon(daemon.admin, "/admin/reload", {}, answer_s=120.0)
        until(lambda: daemon.status()["ready"]["device"] == "SIM.1", what="the target moves")
        flow.wait_pieces()
        flow.over.set()
        thread.join()
        assert flow.lost == []
        assert set(flow.whole) == {expected}
        plan = query_daemon(daemon.admin, "/admin/plan")["plan"]
        assert plan["replicas"][0]["shards"][0]["device"] == "here/SIM.1"
        assert "Traceback" not in daemon.log.read_text()


def test_a_plan_that_is_made_anew_keeps_off_a_cordoned_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    script = "base_ms=4&other_ms=5"
    store_simulated_profiles(tmp_path / "store" / "profiles", {"SIM": 4.0, "SIM.1": 6.0}, script=script)
    path = configuration(tmp_path, script=script)
    text = path.read_text().replace("adapter: simulated", "adapter: auto, device: auto", 1)
    path.write_text(text + "placement: {profile: never, drift_tolerance: 9, replan_pause_s: 1}\n")
    with running(path) as daemon:
        hold = {"kind": "device", "name": "here/SIM"}
        query_daemon(daemon.admin, "/admin/hold", hold | {"state": "cordoned"})
        until(lambda: daemon.status()["ready"]["device"] == "SIM.1", what="the target moves")
        moved = daemon.status()["ready"]["pid"]
        path.write_text(text + "placement: {profile: never, drift_tolerance: 8, replan_pause_s: 1, concurrency: 2}\n")
        told = query_daemon(daemon.admin, "/admin/reload", {}, answer_s=240.0)
        assert {one["key"] for one in told["changes"]} == {"placement.drift_tolerance", "placement.concurrency"}
        time.sleep(2.0)  # time to move, if it would
        assert (daemon.status()["ready"]["device"], daemon.status()["ready"]["pid"]) == ("SIM.1", moved)
        query_daemon(daemon.admin, "/admin/hold", hold | {"state": ""})
        until(lambda: daemon.status()["ready"]["device"] == "SIM", what="the target comes back")
        assert "Traceback" not in daemon.log.read_text()


def test_the_next_daemon_adopts_no_worker_that_was_retuned(tmp_path: Path) -> None:
    """Its options are no longer those of the file that it was started from."""
    path = configuration(tmp_path)
    text = path.read_text()
    path.write_text(text + "speculation: {num_speculative_tokens: 3}\n")
    with running(path) as daemon:
        path.write_text(text + "speculation: {num_speculative_tokens: 5}\n")
        query_daemon(daemon.admin, "/admin/reload", {}, answer_s=60.0)
        assert daemon.status()["ready"]["max_depth"] == 5
        before = daemon.status()["ready"]["pid"]
        daemon.kill()
    path.write_text(text + "speculation: {num_speculative_tokens: 3}\n")
    with running(path) as daemon:
        assert daemon.status()["ready"]["max_depth"] == 3
        assert daemon.status()["ready"]["pid"] != before
