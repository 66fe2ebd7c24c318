"""Streams that take their KV cache along, in a world of workers that answer late, wrongly, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from orchestrator.daemon.control.actions import Action, AskPages, DropPages, LogLine, Send
from orchestrator.daemon.control.events import (
    ClusterOpened,
    RolloutAsked,
    StreamClosed,
    StreamOpened,
    Woke,
    WorkersChosen,
)
from orchestrator.daemon.control.events import WorkerSaid as Said
from orchestrator.daemon.control.port import KvMoveTotals
from orchestrator.daemon.control.state import READY as READY_PHASE
from orchestrator.daemon.control.state import RESTARTING
from orchestrator.daemon.control.streams.kv_moves import PLACE_PATIENCE_S
from orchestrator.protocol.commands import KvPages, SharedMemory, Submit
from orchestrator.protocol.events import MovedIn, MovedOut
from tests.api.support import READY
from tests.control.test_step import INDEXES, MAX_TOKENS, ControlMachine, World, serve, spec
from tests.support.ready import change_ready

PROMPT = [7] * 600
PAGE_BYTES = 16 * 1024


@dataclass
class _Asked:
    worker: int
    sent_id: str
    key: str


class MovingWorld(World):
    """Workers that can move pages. `kept`: shared memory; `asked`: what workers have not answered; `given`: what they
    began with pages and have not told of."""

    def __init__(self, max_restarts: int, *, pages: bool = True) -> None:
        super().__init__(max_restarts)
        self.state.router.moves.enabled = self.state.router.moves.share_memory = pages
        self.kept: dict[str, int] = {}
        self.asked: list[_Asked] = []
        self.given: list[tuple[int, str, int]] = []
        self.prompts: dict[str, list[int]] = {}
        self.log: list[str] = []

    def do(self, action: Action) -> None:
        match action:
            case AskPages(worker, key, sent_id, most_bytes):
                assert key not in self.kept, "one memory for one move"
                assert sent_id in self.processes[worker].has, "who is asked has the stream"
                assert most_bytes > 0
                self.kept[key] = most_bytes
                self.asked.append(_Asked(worker, sent_id, key))
            case DropPages(key):
                del self.kept[key]
            case LogLine():
                self.log.append(action.text % action.values)
            case Send(worker, Submit() as submit) if submit.pages is not None:
                pages, key = submit.pages, submit.request_id.partition("#")[0]
                assert pages.memory.name in self.kept, "memory is kept while a worker may read it"
                assert pages.positions == len(submit.prompt) + len(submit.committed) - 1
                assert pages.format == self.format_of(worker)
                assert submit.prompt == self.prompts[key]
                super().do(action)
                self.given.append((worker, submit.request_id, pages.length_bytes))
            case _:
                super().do(action)

    def format_of(self, worker: int) -> str:
        return f"pages of {self.processes[worker].spec.options['kind']}"

    def make_ready(self, worker: int) -> None:
        process = self.processes[worker]
        process.ready = not process.stopping
        says: dict[str, Any] = {"slots": 2, "activations": process.spec.options["kind"], "block_tokens": 16}
        says |= {"kv_format": self.format_of(worker), "kv_page_bytes": PAGE_BYTES}
        self.tell(Said(worker, change_ready(READY, **says)))

    def open(self, key: str, prompt: list[int]) -> None:
        self.delivered[key], self.prompts[key] = [], prompt
        self.tell(StreamOpened(Submit(key, prompt, MAX_TOKENS)))

    def answer(self, asked: _Asked, why: str = "") -> None:
        """A worker moves a stream out; one that has lost it by now says so, and nobody minds."""
        self.asked.remove(asked)
        process = self.processes.get(asked.worker)
        if process is None or not process.ready:
            return
        position = process.has.pop(asked.sent_id, None)
        key = asked.sent_id.partition("#")[0]
        if self.holder.get(key) == (asked.worker, asked.sent_id):
            del self.holder[key]
        if position is None or why:
            self.tell(Said(asked.worker, MovedOut(asked.sent_id, None, 1.0, why or "nothing of it was computed")))
            return
        positions = len(self.prompts[key]) + position - 1
        memory = SharedMemory("", asked.key, 0)
        length = -(-positions // 16) * PAGE_BYTES
        pages = KvPages(memory, self.format_of(asked.worker), positions, length, "sum")
        self.tell(Said(asked.worker, MovedOut(asked.sent_id, pages, 8.0)))

    def take_in(self, why: str = "") -> None:
        worker, sent_id, length = self.given.pop(0)
        if worker in self.processes and self.processes[worker].ready:
            self.tell(Said(worker, MovedIn(sent_id, 0 if why else length, 4.0, why)))

    @property
    def totals(self) -> KvMoveTotals:
        return sum(self.state.router.moves.totals.values(), KvMoveTotals())


class MovingMachine(ControlMachine):
    """Anything may happen to streams on the way."""

    world: MovingWorld
    builds = 0

    @initialize(replicas=st.integers(1, 3), max_restarts=st.sampled_from([0, 2, 9]), count=st.integers(0, 5))
    def begin(self, replicas: int, max_restarts: int, count: int) -> None:
        self.world = MovingWorld(max_restarts)
        self.world.tell(WorkersChosen([spec(f"t{number}") for number in range(replicas)], []))
        self.world.tell(ClusterOpened())
        if count:
            self.all_workers_become_ready()
            self.streams_open(count)

    @rule(count=st.integers(1, 4))
    def streams_open(self, count: int) -> None:
        phases = {one.state.phase for one in self.world.state.replicas.serving}
        if not self.closed and phases & {READY_PHASE, RESTARTING}:
            for _ in range(count):
                self.opened += 1
                self.world.open(f"r{self.opened}", [self.opened] * 600)

    @rule(replicas=st.integers(1, 2), answers=st.integers(0, 3), tells=st.integers(0, 3))
    def a_rollout_finds_streams(self, replicas: int, answers: int, tells: int) -> None:
        """All is well until then, so that there is something to move."""
        self.all_workers_become_ready()
        self.streams_open(2)
        self.all_workers_decode(2)
        if not self.closed and not self.world.changing:
            self.builds += 1
            self.world.changing = True
            self.world.tell(RolloutAsked([spec(f"n{n}", build=self.builds + 2) for n in range(replicas)], []))
            self.all_workers_become_ready()
            for asked in self.world.asked[:answers]:
                self.world.answer(asked)
            for _ in self.world.given[:tells]:
                self.world.take_in()

    @rule(index=INDEXES, refuses=st.sampled_from([False, False, True]))
    def a_worker_moves_a_stream_out(self, index: int, refuses: bool) -> None:
        if self.world.asked:
            asked = self.world.asked[index % len(self.world.asked)]
            self.world.answer(asked, "no memory" if refuses else "")

    @rule(fails=st.booleans())
    def a_worker_tells_of_pages(self, fails: bool) -> None:
        if self.world.given:
            self.world.take_in("another checksum" if fails else "")

    @rule(index=INDEXES)
    def a_worker_tells_of_a_move_that_is_over(self, index: int) -> None:
        if self.world.forgotten:
            worker, sent_id = self.world.forgotten[index % len(self.world.forgotten)]
            pages = KvPages(SharedMemory("", "old", 0), self.world.format_of(worker), 1, 1, "")
            self.world.tell(Said(worker, MovedOut(sent_id, pages, 1.0)))
            self.world.tell(Said(worker, MovedIn(sent_id, 1, 1.0)))

    @invariant()
    def memory_is_kept_for_live_streams_only(self) -> None:
        if hasattr(self, "world") and not self.world.state.replicas.closed:
            keys = {key.partition("#")[0] for key in self.world.kept}
            assert keys <= set(self.world.delivered)
            assert len(keys) == len(self.world.kept) <= 4


TestMoving = MovingMachine.TestCase
TestMoving.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def replacing(streams: int = 1, *, tokens: int = 3, pages: bool = True) -> MovingWorld:
    """A world in which one replica with streams has just given way to another."""
    world = MovingWorld(1, pages=pages)
    serve(world, 1)
    world.make_ready(0)
    for number in range(streams):
        world.open(f"r{number}", PROMPT)
    if tokens:
        world.decode(0, [tokens] * streams)
    world.changing = True
    world.tell(RolloutAsked([spec("new", build=1)], []))
    world.start(1)
    world.make_ready(1)
    return world


def test_a_stream_runs_on_until_its_pages_go_along() -> None:
    world = replacing()
    assert world.holder == {"r0": (0, "r0")}
    world.decode(0, [2])  # the round that was under way
    world.answer(world.asked[0])
    assert world.processes[1].has == {"r0#2": 5}
    assert world.processes[0].stopping, "nothing is left there"
    assert world.kept
    world.take_in()
    assert not world.kept
    world.decode(1, [MAX_TOKENS])
    (totals,) = world.state.router.moves.totals.values()
    assert (totals.pages, totals.recomputed, totals.bytes) == (1, 0, 38 * PAGE_BYTES)
    assert any("gave away its streams: 1 with their KV cache" in line for line in world.log)


def test_a_worker_that_does_not_answer_in_time_costs_the_pages_only() -> None:
    world = replacing()
    world.now_s += 2.0
    world.tell(Woke())
    assert world.holder == {"r0": (0, "r0")}
    world.now_s += 30.0
    world.tell(Woke())
    assert world.processes[1].has == {"r0#2": 3}
    assert not world.kept
    world.answer(world.asked[0])
    assert world.processes[1].has == {"r0#2": 3}
    assert world.totals == KvMoveTotals(recomputed=1)
    assert any("no pages after 3.0 s" in line for line in world.log)


def test_a_worker_that_dies_on_the_way_costs_the_pages_only() -> None:
    world = replacing()
    world.end_process(0)
    assert world.processes[1].has == {"r0#2": 3}
    assert not world.kept
    assert world.totals == KvMoveTotals(recomputed=1)


def test_the_next_worker_may_die_with_the_pages() -> None:
    world = replacing()
    world.answer(world.asked[0])
    world.end_process(1)
    assert not world.kept
    world.start(1)
    world.make_ready(1)
    assert world.processes[1].has == {"r0#3": 3}
    assert not world.given or world.given[0][1] == "r0#2"
    assert world.totals == KvMoveTotals(recomputed=1)


def test_a_client_that_leaves_takes_its_memory_with_it() -> None:
    for step in range(3):
        world = replacing()
        if step:
            world.answer(world.asked[0])
        if step == 2:
            world.now_s += 40.0
            world.tell(Woke())
        world.tell(StreamClosed("r0"))
        assert not world.kept
        assert world.totals == KvMoveTotals()


def test_streams_that_find_no_place_run_on_for_a_while() -> None:
    """Two of four have a place in the next replica; the others go on where they are, and then have to wait there."""
    world = replacing(streams=1)
    world.open("busy0", PROMPT)
    world.open("busy1", PROMPT)
    assert world.processes[1].has == {"busy0": 0, "busy1": 0}
    assert world.holder["r0"] == (0, "r0")
    for asked in list(world.asked):
        world.answer(asked)
    assert "r0#2" in world.processes[1].has, "it was asked for while there was a place"
    world = replacing(streams=2)
    assert len(world.asked) == 2
    crowded = MovingWorld(1)
    serve(crowded, 2)
    for worker in range(2):
        crowded.make_ready(worker)
    for number in range(4):
        crowded.open(f"r{number}", [number, *PROMPT])
    for worker in range(2):
        crowded.decode(worker, [3, 3])
    crowded.changing = True
    crowded.tell(RolloutAsked([spec("t0")], []))
    assert not crowded.asked
    crowded.decode(1, [2, 2])
    assert len(crowded.processes[1].has) == 2, "there is no place, and it goes on"
    crowded.now_s += PLACE_PATIENCE_S + 1.0
    crowded.tell(Woke())
    assert len(crowded.processes[0].has) == 4
    assert crowded.totals == KvMoveTotals(recomputed=2)


def test_only_so_many_move_at_a_time() -> None:
    world = MovingWorld(1)
    world.tell(WorkersChosen([spec("t0")], []))
    world.tell(ClusterOpened())
    world.start(0)
    many = {"slots": 8, "activations": "fp32", "block_tokens": 16, "kv_page_bytes": PAGE_BYTES}
    ready = change_ready(READY, kv_format="pages of fp32", **many)
    world.processes[0].ready = True
    world.tell(Said(0, ready))
    for number in range(8):
        world.open(f"r{number}", [number, *PROMPT])
    world.decode(0, [3] * 8)
    world.changing = True
    world.tell(RolloutAsked([spec("new", build=1)], []))
    world.start(1)
    world.processes[1].ready = True
    world.tell(Said(1, ready))
    done = 0
    while world.asked:
        assert len(world.asked) <= 4
        world.decode(0, [1] * 8)
        world.answer(world.asked[0])
        world.take_in()
        done += 1
    assert done == 8
    assert world.totals.pages == 8
    assert world.processes[0].stopping


def test_what_is_cheaper_to_compute_or_shares_no_memory_is_computed_again() -> None:
    for world in (replacing(pages=False), MovingWorld(1)):
        if not world.processes:
            serve(world, 1)
            world.make_ready(0)
            world.open("r0", [1, 2])
            world.decode(0, [1])
            world.changing = True
            world.tell(RolloutAsked([spec("new", build=1)], []))
            world.start(1)
            world.make_ready(1)
        assert not world.kept
        assert list(world.processes[1].has) == ["r0#2"]
        assert world.totals == KvMoveTotals(recomputed=1)


def test_pages_that_turn_out_wrong_are_told_and_dropped() -> None:
    world = replacing()
    world.answer(world.asked[0])
    world.take_in("another checksum")
    assert not world.kept
    assert world.totals == KvMoveTotals(recomputed=1)
    assert any("another checksum" in line for line in world.log)
    world.decode(1, [MAX_TOKENS])
    world = replacing()
    world.answer(world.asked[0], "the host has no memory")
    assert world.processes[1].has == {"r0#2": 3}
    assert not world.kept
