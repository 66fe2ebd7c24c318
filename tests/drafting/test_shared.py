"""One draft worker for several targets: everybody's output is their own, and nobody holds up anybody."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat

import msgspec
import pytest

from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import GREETING_S, LinkLost, host_id, knock
from orchestrator.protocol.rounds import RoundReport
from orchestrator.worker.drafting.port import Ask
from orchestrator.worker.drafting.protocol import VERSION, Begin, DraftRequest, Extend, Hello, Link, Update, Welcome
from orchestrator.worker.drafting.remote.drafter import RemoteDrafter
from policies.sampling import Sampling
from tests.drafting.test_remote import expected as expected
from tests.drafting.test_remote import remote, remote_of, requests, until
from tests.drafting.test_remote import texts as texts
from tests.support.drafters import KnowingDrafter, in_a_thread
from tests.support.fixed_depth import FixedDepth
from tests.support.loops import decode, loop_over, toy

REQUESTS = requests(6)
MANY = 3  # rounds of all requests, so that targets are at it at the same time for long enough


class Target(threading.Thread):
    """A target over the toy model in a thread of its own, which decodes the same requests over and over."""

    def __init__(self, drafter: RemoteDrafter, submits: Sequence[Submit], times: int = MANY) -> None:
        super().__init__(daemon=True)
        self.outs: list[dict[str, list[int]]] = []
        self.rounds: list[RoundReport] = []
        self._drafter = drafter
        self._submits = submits
        self._times = times

    def run(self) -> None:
        loop = loop_over(toy(script="base_ms=3"), self._drafter, policy=FixedDepth(8))
        for number in range(self._times):
            submits = [
                msgspec.structs.replace(submit, request_id=f"{submit.request_id}:{number}") for submit in self._submits
            ]
            out, rounds = decode(loop, submits)
            self.outs.append({key.partition(":")[0]: tokens for key, tokens in out.items()})
            self.rounds += rounds

    @property
    def accepted(self) -> int:
        return sum(done.accepted for done in self.rounds)


def run_all(targets: Sequence[Target]) -> None:
    for target in targets:
        target.start()
    for target in targets:
        target.join(60.0)
        assert not target.is_alive()


@contextmanager
def connect_targets(door: LinkEndpoint, count: int) -> Iterator[list[RemoteDrafter]]:
    with ExitStack() as stack:
        yield [stack.enter_context(remote(door))[0] for _ in range(count)]


def test_targets_share_passes_and_every_output_is_the_targets_own(expected, texts):
    inner = KnowingDrafter(texts, wrong_every=7, token_ms=0.5)
    with in_a_thread(inner) as door, connect_targets(door, 3) as drafters:
        targets = [Target(drafter, REQUESTS) for drafter in drafters]  # the same names of requests in all three
        run_all(targets)
        for target in targets:
            assert target.outs == [expected] * MANY
            assert target.accepted > 100
    shared = [keys for keys in inner.passes if len({key.partition("/")[0] for key in keys}) > 1]
    assert shared, "passes have rows of several targets"
    assert not inner._held, "who has gone leaves nothing"


def test_no_pass_waits_for_company(texts):
    inner = KnowingDrafter(texts)
    with in_a_thread(inner, runs_ahead="never") as door, connect_targets(door, 2) as (drafter, silent):
        silent.begin("other", REQUESTS[1].prompt, Sampling())
        drafter.begin("a", REQUESTS[0].prompt, Sampling())
        until(lambda: drafter.propose([Ask("a", 4, round_ms=1000.0)])[0].tokens)
        assert all(len(keys) == 1 for keys in inner.passes)


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_target_that_is_gone_in_the_middle_leaves_the_others_as_fast_as_they_were(expected, texts, how):
    inner = KnowingDrafter(texts, token_ms=0.2)
    with in_a_thread(inner) as door, connect_targets(door, 1) as (drafter,):
        with talk(door) as (link, _):
            prompt = REQUESTS[0].prompt
            begins: list[Update] = [Begin(f"s{number}", list(prompt), Sampling()) for number in range(8)]
            link.send(DraftRequest(1, begins, [Ask(f"s{number}", 8) for number in range(8)], 1000.0))
            until(lambda: len(inner._held) == 8)
            if how == "killed":
                link.close()  # as the kernel does it for a process that is killed
                until(lambda: not inner._held)
            target = Target(drafter, REQUESTS)
            run_all([target])
        assert target.outs == [expected] * MANY
        assert target.accepted > 100
        assert remote_of(drafter).connections == 1


@contextmanager
def talk(door: LinkEndpoint, name: str = "") -> Iterator[tuple[Link, Welcome]]:
    """A target played by hand."""
    link = Link(knock(door))
    try:
        link.send(Hello(VERSION, "elsewhere", "SIM", [], name))
        yield link, link.welcome(GREETING_S)
    finally:
        link.close()


def test_a_target_that_comes_back_has_a_session_of_its_own_and_the_old_one_is_over(texts):
    inner = KnowingDrafter(texts)
    with in_a_thread(inner) as door, talk(door, "me") as (old, _):
        old.send(DraftRequest(1, [Begin("a", list(REQUESTS[0].prompt), Sampling())], []))
        until(lambda: len(inner._held) == 1)
        with talk(door, "me") as (new, _):
            until(lambda: not inner._held)
            with pytest.raises(LinkLost):
                until(lambda: old.answer(0.01))
            new.send(DraftRequest(1, [Begin("a", list(REQUESTS[0].prompt), Sampling())], [Ask("a", 4)], 1000.0))
            answer = new.answer(10.0)
            assert answer is not None
            assert answer.drafts[0].tokens
            with talk(door, "somebody else"):
                assert len(inner._held) == 1


@pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["one machine", "another"])
def test_strangers_that_say_nothing_or_drip_keep_nobody_out(expected, texts, host):
    with in_a_thread(KnowingDrafter(texts), host=host) as near, ExitStack() as stack:
        door = msgspec.structs.replace(near, addresses=near.addresses[-1:])
        place = door.addresses[0].partition(":")[2]
        strangers = []
        for _ in range(40):  # more than are greeted at a time
            stranger = stack.enter_context(socket.socket(socket.AF_INET if host else socket.AF_UNIX))
            stranger.connect((host, int(place.rpartition(":")[2])) if host else place.replace("@", "\0", 1))
            strangers.append(stranger)
        stop = threading.Event()

        def drip() -> None:
            long_record = chain(
                b"\x16\x03\x01\x40\x00", repeat(0)
            )  # as TLS begins, and what nobody waits for the end of
            while not stop.wait(0.05):
                piece = bytes([next(long_record)])
                for stranger in strangers:
                    try:
                        stranger.send(piece)
                    except OSError:
                        continue

        dripping = threading.Thread(target=drip, daemon=True)
        dripping.start()
        started_s = time.monotonic()
        with remote(door) as (drafter, _):
            assert time.monotonic() - started_s < GREETING_S
            target = Target(drafter, REQUESTS, 1)
            run_all([target])
        stop.set()
        dripping.join(5.0)
        assert target.outs == [expected]
        assert target.accepted > 50


def test_a_target_that_drips_or_does_not_read_holds_up_nobody(expected, texts):
    with (
        in_a_thread(KnowingDrafter(texts)) as door,
        connect_targets(door, 1) as (drafter,),
        talk(door) as (dripping, _),
    ):
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.001):
                dripping._socket.send(b"\0")  # a frame of no bytes, every so often: nothing that makes sense

        frame = (10_000).to_bytes(4, "big")
        dripping._socket.send(frame)
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with talk(door) as (deaf, _):
            deaf.send(DraftRequest(1, [Begin("a", list(REQUESTS[0].prompt), Sampling())], []))
            for number in range(2, 4000):
                deaf.send(DraftRequest(number, [], [Ask("a", 32)], 0.0))
            target = Target(drafter, REQUESTS)
            run_all([target])
        stop.set()
        thread.join(5.0)
        assert target.outs == [expected] * MANY
        assert target.accepted > 100


def test_an_ask_whose_target_went_on_is_answered_behind_what_it_chose_since(texts):
    prompt, text = REQUESTS[0].prompt, texts[0]
    behind = len(prompt)
    with in_a_thread(KnowingDrafter(texts)) as door, talk(door) as (link, _):
        link.send(DraftRequest(1, [Begin("a", list(prompt), Sampling())], [Ask("a", 4)], 10_000.0))
        assert (first := link.answer(10.0)) is not None
        assert list(first.drafts[0].tokens) == text[behind : behind + 4]
        for number in range(2, 30):  # whatever of these is read at once
            base = behind + number - 2
            link.send(DraftRequest(number, [], [Ask("a", 4)], 10_000.0))
            link.send(DraftRequest(number, [Extend("a", [text[base]])], []))
            answer = link.answer(10.0)
            assert answer is not None
            assert answer.number == number
            tokens, offset = list(answer.drafts[0].tokens), sum(answer.offsets)
            assert 0 <= offset <= 1
            assert tokens == text[base + offset : base + offset + len(tokens)]


@pytest.mark.parametrize(
    ("ours", "theirs", "ahead"),
    [
        (("CPU", [0]), ("CPU", [1]), True),
        (("CPU", [0, 1]), ("CPU", [1, 2]), False),
        (("CPU", []), ("CPU", [1]), False),
        (("GPU.0", []), ("GPU", []), False),
        (("GPU.1", []), ("CPU", []), True),
    ],
)
def test_it_runs_ahead_where_cores_and_devices_are_apart(texts, ours, theirs, ahead):
    inner = Elsewhere(texts, *ours)
    with in_a_thread(inner) as door:
        link = Link(knock(door))
        link.send(Hello(VERSION, host_id(), *theirs))
        assert link.welcome(GREETING_S).runs_ahead is ahead
        link.close()
        with talk(door) as (_, welcome):  # another host
            assert welcome.runs_ahead


class Elsewhere(KnowingDrafter):
    """A drafter that says where it runs."""

    def __init__(self, texts: Sequence[Sequence[int]], device: str, cores: list[int]) -> None:
        super().__init__(texts)
        self._where = (device, cores)

    def states(self) -> list[DrafterState]:
        device, cores = self._where
        return [msgspec.structs.replace(state, device=device, cores=cores) for state in super().states()]


def test_a_target_that_is_faster_than_passes_gets_drafts_behind_what_it_chose_meanwhile(expected, texts):
    inner = KnowingDrafter(texts, token_ms=8.0)
    with in_a_thread(inner, runs_ahead="never") as door, talk(door) as (link, _), connect_targets(door, 1) as (other,):
        prompt, text = REQUESTS[0].prompt, texts[0]
        link.send(DraftRequest(1, [Begin("a", list(prompt), Sampling())], [Ask("a", 2)], 1000.0))
        assert link.answer(10.0) is not None
        target = Target(other, REQUESTS, 1)
        target.start()
        offsets: list[int] = []
        for number in range(2, 14):
            base = len(prompt) + 3 * (number - 2)
            link.send(DraftRequest(number, [], [Ask("a", 8)], 1000.0))
            time.sleep(0.004)
            link.send(DraftRequest(number, [Extend("a", text[base : base + 3])], []))
            answer = link.answer(10.0)
            assert answer is not None
            offsets.append(sum(answer.offsets))
            found = list(answer.drafts[0].tokens)
            assert found == text[base + offsets[-1] : base + offsets[-1] + len(found)]
        target.join(60.0)
        assert 3 in offsets
        assert target.outs == [expected]
