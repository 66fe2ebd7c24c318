"""A target worker on virtual time: it takes control's commands, and says what a worker says.

Between two changes of its batch all rounds are alike, so they are one step. A batch changes where a sequence joins, has
its prompt read, or ends. What the engine decides, the engine's own policies decide here: who starts
(policies.serving.admission), how much of a prompt a forward takes (policies.serving.prefill_budget), who gives way, and
how deep each sequence is drafted for (simulation.courses).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING
from zlib import crc32

from device_profiles.units import MS_PER_S, ceil_div
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import Delta, Gauges, RequestStats, RoundReport
from outrider_lab.simulation.courses import CompanyCourses, find_company
from outrider_lab.simulation.draft_worker import SimulatedDraftWorker
from outrider_lab.simulation.figures import TargetUse
from outrider_lab.simulation.fleet import BLOCK_TOKENS, SUFFIX, PlacedReplica
from policies.serving.admission import count_admissible_requests, victims
from policies.serving.prefill_shares import bound_prefill_rows, share_rows, waits_for_replays
from policies.serving.replay_budget import ReplayBudget, observe_decoding, observe_replay

if TYPE_CHECKING:
    from outrider_lab.simulation.processes import Processes

_GAUGES_EVERY_S = 1.0
_MOST_STEP_S = 60.0


class SimulatedTarget:
    """See the module. `number`: its worker's."""

    def __init__(self, processes: Processes, number: int, replica: PlacedReplica, use: TargetUse) -> None:
        self._processes, self._world = processes, processes.world
        self.number, self.replica, self.kind = number, replica, replica.kind
        self.use = use
        self._bits = name_bits(replica.kind.group)
        self.rounds = 0  # all that it ran
        self.slowness = 1.0
        self.frozen = False
        self.draft: SimulatedDraftWorker | None = None
        self._running: list[SimulatedSequence] = []
        self._waiting: deque[SimulatedSequence] = deque()
        self._courses: CompanyCourses = self.kind.book.plain
        self._company = 0
        self._company_drafted = 0
        self._drafting = False
        self._step = 0  # of which one ends next; older ones do not count
        self._began_s = self._round_s = 0.0
        self._rounds = 0  # of the step under way
        self._run_rows = 0  # of its forwards, drafts left out
        self._change_s = 0.0  # that its first round takes longer than the other ones
        self._gauged_s = -1.0
        self._preempted = 0
        self._frozen_left_s = 0.0
        self._decoding = 0  # of the step under way: sequences that decode, and what a round of them makes and drafts
        self._made = self._drafted = self._draft_ms = 0.0
        self._filling: Sequence[tuple[SimulatedSequence, int]] = ()
        self._replays = ReplayBudget()
        self._replaying = 0  # of the step under way: rows of replays, where these alone are read beside decoding
        self._prefixes: OrderedDict[str, int] = OrderedDict()

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    def list_keys(self) -> list[str]:
        return [one.key for one in self._running]

    def say_gauges(self) -> None:
        kind, now_s = self.kind, self._world.now_s
        self._gauged_s = now_s
        total = kind.kv_tokens // BLOCK_TOKENS
        free = max(0, total - ceil_div(self._count_held(), BLOCK_TOKENS))
        drafters = [DrafterState(SUFFIX, "suffix")] if kind.max_depth and len(kind.book) else []
        if kind.draft is not None:
            drafters.append(DrafterState(kind.draft.name, "model", "ok" if self.draft is not None else "starting"))
        told = Gauges(
            *(len(self._running), len(self._waiting), free, total, self._preempted, 0, self.rounds, 0),
            drafters=drafters,
        )
        self._processes.tell(self.number, told)

    def submit(self, submit: Submit) -> None:
        key = submit.request_id.partition("#")[0]
        now_s = self._world.now_s
        sequence = SimulatedSequence(key, submit, self._world.find_output(key), now_s)
        place = len(self._waiting)
        while sequence.base and place and not self._waiting[place - 1].base:
            place -= 1  # whoever was served before goes first
        self._waiting.insert(place, sequence)
        if not self._running:
            self._begin_step()
        elif len(self._running) < self.kind.places:
            self._end_early()

    def cancel(self, sent_id: str) -> None:
        for sequence in self._waiting:
            if sequence.sent_id == sent_id:
                self._waiting.remove(sequence)
                return
        for sequence in self._running:
            if sequence.sent_id == sent_id:
                self._take_out(sequence)
                self._company = 0
                self._end_early()
                return

    def follow_draft(self, draft: SimulatedDraftWorker | None) -> None:
        """Draft with this worker from the next round on, or with none."""
        if self.draft is not None:
            self.draft.targets.discard(self)
        self.draft = draft
        if draft is not None:
            draft.targets.add(self)
        self._company = 0
        if self._running:
            self._end_early()

    def tell_progress(self) -> None:
        """Say what was decoded so far, as a worker does in each round: before it is lost, or stands still."""
        if not self._running or not self._round_s:
            return
        ran = min(self._rounds, self._count_ended_rounds())
        self.rounds += ran
        deltas = []
        for one in self._running:
            if not one.unread and (made := min(self._count_tokens(one), one.base + one.left - 1)) > one.told:
                deltas.append(Delta(one.sent_id, one.say(made, self._bits)))
        self.rounds -= ran
        if deltas:
            self._processes.tell(self.number, self._report(deltas))

    def freeze(self) -> None:
        if not self.frozen:
            self.tell_progress()
            self.frozen = True
            self._frozen_left_s = max(0.0, self._began_s + self._rounds * self._round_s - self._world.now_s)
            self._step += 1

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            if self._running:
                self._began_s = self._world.now_s + self._frozen_left_s - self._rounds * self._round_s
                self._await_end()
            else:
                self._begin_step()

    def slow_down(self, factor: float) -> None:
        """Take so many times as long for each round, from the next one on."""
        self.slowness = factor
        if self._running:
            self._end_early()

    def lose(self) -> None:
        self._step += 1
        self._running.clear()
        self._waiting.clear()
        if self.draft is not None:
            self.draft.targets.discard(self)
            self.draft = None

    def _count_ended_rounds(self) -> int:
        """Return the rounds that ended since the step began. None did within the time that the first takes longer."""
        return max(0, int((self._world.now_s - self._began_s) / self._round_s))

    def _end_early(self) -> None:
        """End the step with the round under way."""
        if self.frozen or not self._round_s:
            return
        rounds = self._count_ended_rounds() + 1
        if rounds < self._rounds:
            self._rounds = rounds
            self._await_end()

    def _await_end(self) -> None:
        self._step += 1
        delay_s = self._began_s + self._rounds * self._round_s - self._world.now_s
        self._world.after(delay_s if delay_s > 0.0 else 0.0, self._end_step, self._step)

    def _end_step(self, step: int) -> None:
        if step == self._step:
            self._advance()
            self._begin_step()

    def _advance(self) -> None:
        """Take in the rounds of the step: who ended, and whose prompt was read."""
        ran = self._rounds
        self.rounds = rounds = self.rounds + ran
        now_s, kept = self._world.now_s, []
        took_s = self._change_s + ran * self._round_s
        self.use.observe_step(ran, took_s, self._decoding, ran * self._made, ran * self._drafted)
        if self._replaying:
            self._replays = observe_replay(self._replays, took_s * MS_PER_S, rows=self._replaying)
        elif self._replays.debt_ms or self._replays.rests:
            self._replays = observe_decoding(self._replays, took_s / ran * MS_PER_S)
        deltas: list[Delta] = []
        for one in self._running:
            if one.unread or one.end > rounds:
                kept.append(one)
            else:
                tokens = one.say(one.base + one.left, self._bits)
                deltas.append(Delta(one.sent_id, tokens, "length", sum_up(one, now_s)))
        for one, rows in self._filling:
            one.unread -= ran * rows
            if one.unread > 0:
                continue
            self._remember(one)
            ends, one.unread, one.first_s = one.left <= 1, 0, now_s
            tokens = one.say(one.base + 1, self._bits)
            deltas.append(Delta(one.sent_id, tokens, "length" if ends else "", sum_up(one, now_s)))
            if ends:
                kept.remove(one)
        self._running = kept
        report = self._report(deltas) if deltas else None
        self._filling = ()  # taken in; a worker that stands still may end its step once more
        if report is not None:
            self._processes.tell(self.number, report)
        if now_s - self._gauged_s >= _GAUGES_EVERY_S or (not kept and not self._waiting):
            self.say_gauges()

    def _begin_step(self) -> None:
        """Start whoever may start, and run rounds until the next change."""
        if self._waiting:
            self._admit()
        running = self._running
        if not running or self.frozen:
            self._round_s = 0.0
            return
        costs, decoding = self.kind.costs, [one for one in running if not one.unread]
        count = self._decoding = len(decoding)
        rounds, round_ms, rows = 1 << 30, 0.0, 0.0
        self._made = self._drafted = 0.0
        context = 0.0
        if decoding:
            if find_company(count) != self._company or self._is_shared_otherwise():
                self._follow_courses(decoding)
            else:
                self._begin_courses(decoding)
            find = self._courses.find
            mine = [find(one.course) for one in decoding]
            self._drafted = sum([one.drafted for one in mine])
            self._made = count + sum([one.accepted for one in mine])
            rows = count * costs.rows(0) + self._drafted
            context = sum([one.known + 0.5 * one.left for one in decoding]) / count
            round_ms = self._time_round(rows, count, context)
            if self.kind.alone != 1.0 and not self._processes.is_crowded(self.replica.machine):
                round_ms *= self.kind.alone
            rounds = max(1, min([one.end for one in decoding]) - self.rounds)
        self._filling = self._share_rows(decoding, context, round_ms) if count < len(running) else ()
        filled = self._replaying = 0
        if self._filling:
            filled = sum([rows for _, rows in self._filling])
            behind = sum([one.known - one.unread for one, _ in self._filling]) / len(self._filling)
            round_ms += costs.forward.chunk_ms(filled, behind, beside=count > 0)
            # A last part that is smaller is a step of its own.
            rounds = min(rounds, *[one.unread // rows for one, rows in self._filling])
            if decoding and all(one.base for one, _ in self._filling):
                rounds, self._replaying = 1, filled
        elif count < len(running):
            rounds = 1  # replays rest
        if self._overfull(decoding):
            rounds = min(rounds, max(1, int(self._count_free() / max(1.0, self._made))))
        self._round_s = round_ms * self.slowness / MS_PER_S
        self._rounds = max(1, min(rounds, int(_MOST_STEP_S / self._round_s)))
        self._change_s = self._time_change(count, filled) * self.slowness / MS_PER_S
        self._began_s = self._world.now_s + self._change_s
        self._await_end()

    def _time_round(self, rows: float, sequences: int, context_tokens: float) -> float:
        forward_ms = self.kind.costs.forward.ms(rows, sequences, context_tokens)
        self._draft_ms = 0.0
        if self._drafting and self.draft is not None:
            # Rounds that pause wait for no draft, and those that draft go so much deeper.
            drafting = self._courses.drafting
            depth = self._drafted / sequences / drafting if drafting else 0.0
            whole_ms = self.draft.time_round(self, forward_ms, depth, sequences, context_tokens)
            self._draft_ms = max(0.0, whole_ms - forward_ms) * drafting
        elif self._drafted:
            self._draft_ms = self._courses.beside_ms
        return forward_ms + self._draft_ms

    def _time_change(self, sequences: int, filled: int) -> float:
        """Return how much longer the first round takes as its forward has another number of rows than the one before,
        in ms. How often drafts change that is in the price of their courses."""
        costs = self.kind.costs
        run_rows = round(costs.forward.count_run_rows(sequences * costs.rows(0), sequences)) + filled
        if run_rows == self._run_rows:
            return 0.0
        self._run_rows = run_rows
        return costs.change_ms * (1.0 - self._courses.changing if self._drafted else 1.0)

    def _share_rows(
        self, decoding: list[SimulatedSequence], context: float, decode_ms: float
    ) -> list[tuple[SimulatedSequence, int]]:
        """Return the rows that each prompt and each replay gets of the next forward. `decode_ms`: what the forward
        takes without them. None where replays are to rest."""
        costs, filling = self.kind.costs, [one for one in self._running if one.unread]
        most = max(1, costs.most_rows - len(decoding) * costs.rows(0))
        replays, prompts = [one for one in filling if one.base], [one for one in filling if not one.base]
        bound = None
        if decoding:
            waits = bool(replays) and waits_for_replays(
                [one.first_s for one in decoding], [one.queued_s for one in replays]
            )
            if waits:
                self._replays = self._replays._replace(decode_ms=decode_ms * self.slowness)
            first = filling[0]
            bound = bound_prefill_rows(
                self._replays,
                row_ms=costs.forward.chunk_ms(128, first.known - first.unread, beside=True) / 128,
                decode_ms=costs.forward.ms(len(decoding) * costs.rows(0), len(decoding), context),
                bound_ms=self.kind.max_itl_ms,
                most=most,
                waits=waits,
            )
        # No chunk reaches over a prompt's end.
        wanted = [one.unread - one.base if one.unread > one.base else one.unread for one in replays]
        shares = share_rows(wanted, [one.unread for one in prompts], most, bound=bound, min_rows=1)
        return [
            *((replays[place], rows) for place, rows in shares.replays),
            *((prompts[place], rows) for place, rows in shares.prompts),
        ]

    def _admit(self) -> None:
        """Start whoever has a place and memory, in order."""
        kind, waiting = self.kind, self._waiting
        if len(self._running) >= kind.places:
            return
        free = (kind.kv_tokens - self._count_held()) // BLOCK_TOKENS
        asked = [one.known // BLOCK_TOKENS + 1 for one in islice(waiting, kind.places - len(self._running))]
        count = count_admissible_requests(
            asked,
            free_blocks=free,
            running=len(self._running),
            max_running=kind.places,
            spare_blocks=len(self._running),
        )
        now_s = self._world.now_s
        for _ in range(count):
            one = waiting.popleft()
            one.started_s = now_s
            if one.prefix in self._prefixes:
                one.reused = min(one.prefix_tokens, one.known - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                one.unread -= one.reused
                self._prefixes.move_to_end(one.prefix)
            self._running.append(one)

    def _follow_courses(self, decoding: list[SimulatedSequence]) -> None:
        """Let all go on as in this company, and as with the drafts that there are now."""
        before = self._courses
        done = [before.find(one.course).count_tokens(self.rounds - one.zero) if one.end else 0 for one in decoding]
        self._company = find_company(len(decoding))
        self._courses = self._choose_courses(len(decoding))
        for one, tokens in zip(decoding, done, strict=True):
            course = self._courses.find(one.course)
            one.zero = self.rounds - course.count_rounds(min(tokens, one.left - 1))
            one.end = one.zero + course.count_rounds(one.left - 1)

    def _begin_courses(self, decoding: list[SimulatedSequence]) -> None:
        """Begin the courses of those whose prompts have just been read."""
        for one in decoding:
            if not one.end:
                one.zero = self.rounds
                one.end = one.zero + self._courses.find(one.course).count_rounds(one.left - 1)

    def _choose_courses(self, sequences: int) -> CompanyCourses:
        kind, draft = self.kind, self.draft
        self._drafting = draft is not None and kind.draft_book is not None
        if draft is None or kind.draft_book is None:
            return kind.book.at(sequences)
        self._company_drafted = find_company(draft.count_everybody())
        return kind.draft_book.at(sequences, draft.price_drafts(self, kind.costs, find_company(sequences)))

    def _is_shared_otherwise(self) -> bool:
        """Whether the draft worker has clearly more or less to do than when the courses were chosen."""
        if not self._drafting or self.draft is None:
            return False
        now, then = find_company(self.draft.count_everybody()), self._company_drafted
        return max(now, then) >= 2 * min(now, then)

    def _overfull(self, decoding: list[SimulatedSequence]) -> bool:
        """Whether the sequences that run may not all fit to their ends. Where they do not fit now, the youngest gives
        way."""
        if sum([one.known + one.left for one in self._running]) <= self.kind.kv_tokens:
            return False
        missing = -self._count_free()
        if missing > 0 and len(self._running) > 1:
            held = [ceil_div(one.known + one.told - one.base, BLOCK_TOKENS) for one in self._running]
            for _ in range(victims(held, missing=ceil_div(missing, BLOCK_TOKENS))):
                self._send_back(self._running[-1])
            decoding[:] = [one for one in decoding if one in self._running]
        return True

    def _send_back(self, one: SimulatedSequence) -> None:
        """Let a sequence give way: its tokens are kept, its cache is computed again."""
        done = self._count_tokens(one) if not one.unread else one.base
        self._take_out(one)
        one.known += done - one.base
        one.left -= done - one.base
        one.base = done
        one.unread, one.reused, one.end = one.known, 0, 0
        self._preempted += 1
        self._waiting.appendleft(one)

    def _take_out(self, one: SimulatedSequence) -> None:
        self._running.remove(one)
        self._filling = [(filled, rows) for filled, rows in self._filling if filled is not one]

    def _count_tokens(self, one: SimulatedSequence) -> int:
        if not one.end:
            return one.base + 1
        made = self._courses.find(one.course).count_tokens(self.rounds - one.zero)
        return one.base + 1 + min(made, one.left - 1)

    def _count_held(self) -> int:
        return sum(
            [
                one.known - one.unread if one.unread else one.known + self._count_tokens(one) - one.base
                for one in self._running
            ]
        )

    def _count_free(self) -> int:
        return self.kind.kv_tokens - self._count_held()

    def _remember(self, one: SimulatedSequence) -> None:
        """Keep the beginning of a prompt, as long as the cache has room for it."""
        if not one.prefix:
            return
        self._prefixes[one.prefix] = one.prefix_tokens
        self._prefixes.move_to_end(one.prefix)
        while self._prefixes and len(self._prefixes) * one.prefix_tokens > self.kind.kv_tokens:
            self._prefixes.popitem(last=False)

    def _report(self, deltas: list[Delta]) -> RoundReport:
        filled = sum([rows for _, rows in self._filling])
        count, costs = self._decoding, self.kind.costs
        drafts = count if self._drafted else 0
        drafted, accepted = round(self._drafted), round(max(0.0, self._made - count))
        round_ms = self._round_s * MS_PER_S
        return RoundReport(
            *(deltas, count, round(count * costs.rows(0) + self._drafted) + filled, drafts, drafted, accepted, []),
            *(round_ms, round_ms - self._draft_ms, self._draft_ms),
            expected_ms=round_ms / self.slowness,
            round_tokens=self._made,
        )


class SimulatedSequence:
    """A sequence. `known`: tokens to be read before it decodes, of which `unread` are left. `zero` and `end`: the
    worker's rounds at which its course began, and ends. It has `base` tokens from before its course."""

    def __init__(self, key: str, submit: Submit, output: tuple[int, int, str, int], now_s: float) -> None:
        self.key = key
        tokens, self.course, self.prefix, self.prefix_tokens = output
        self.sent_id = submit.request_id
        self.base = self.told = len(submit.committed)
        self.known = self.unread = len(submit.prompt) + self.base
        self.left = max(1, tokens - self.base)
        self.queued_s = now_s
        self.started_s = self.first_s = -1.0
        self.zero = self.end = self.reused = 0

    def say(self, until: int, bits: int) -> list[int]:
        """Return the tokens of its output that were not said yet, up to so many of them."""
        first, self.told = bits + self.told, until
        return list(range(first, bits + until))


def name_bits(group: str) -> int:
    """Return the first token of every output of a group of equal bits; each token is one more than that before it. So a
    token says its place, and who computed it."""
    return crc32(group.encode()) << 32


def sum_up(one: SimulatedSequence, now_s: float) -> RequestStats:
    """Return what its worker says of a sequence now."""
    first_s = one.first_s if one.first_s >= 0.0 else now_s
    return RequestStats(
        *(one.known, one.base + one.left, 0, 0, 0),
        queue_ms=(one.started_s - one.queued_s) * MS_PER_S,
        prefill_ms=(first_s - one.started_s) * MS_PER_S,
        reused=one.reused,
    )
