"""How requests go on, round by round: recorded requests under the depth policy itself, in company of so many.

A recording has, for each place in an output, what the drafter proposed there and how much of it was right. It is
replayed under the policy once for each number of sequences that run together. What comes of it is a course for each
request: how many tokens it has after each of its rounds. So the rounds between two changes of a batch are drawn in one
step, and each was decided by the policy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from outrider_lab.replay.fixed import FixedDepth
from outrider_lab.replay.recorded import Costs, RecordedDraft, RecordedRequest
from outrider_lab.replay.run import RequestRound, Step, replay
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import start_cost_model
from policies.speculation.policy import DepthPolicy

COMPANIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of sequences that courses are replayed for; another number takes those of the nearest one."""
_LEAST_ROUNDS = 400
"""A replay goes on for so many rounds, so that the policy has learned what it can."""


@dataclass(frozen=True, slots=True)
class Course:
    """One request: `tokens[i]` are there after i rounds, from 0. Of its rounds each had `drafted` and `accepted` draft
    tokens on the mean. Behind its end it begins again, for outputs that are longer."""

    tokens: tuple[int, ...]
    drafted: float
    accepted: float

    def count_tokens(self, rounds: int) -> int:
        last = len(self.tokens) - 1
        whole, rest = divmod(rounds, last)
        return whole * self.tokens[last] + self.tokens[rest]

    def count_rounds(self, tokens: int) -> int:
        last = len(self.tokens) - 1
        whole, rest = divmod(tokens, self.tokens[last])
        return whole * last + (bisect_left(self.tokens, rest) if rest else 0)


PLAIN = Course((0, 1), 0.0, 0.0)
"""A token a round."""


@dataclass(frozen=True, slots=True)
class CompanyCourses:
    """The courses of all recorded requests in company of `sequences`, in the order of the recording. A round took
    `beside_ms` more than a forward of the mean number of rows: drafting, and what changing numbers of rows cost. In
    `drafting` of its rounds (0 to 1) somebody drafted, in `changing` of them more or less than in the one before."""

    sequences: int
    courses: tuple[Course, ...]
    beside_ms: float
    drafting: float = 0.0
    changing: float = 0.0

    def find(self, number: int) -> Course:
        """Return the course of a request with this number; there may be more requests than courses."""
        return self.courses[number % len(self.courses)]


class CourseBook:
    """Courses by company, replayed when they are first asked for. `costs`: what rounds take on the device. `speculates`
    False: nothing is drafted."""

    def __init__(
        self, requests: Sequence[RecordedRequest], costs: Costs, *, most: int, fixed: int | None = None
    ) -> None:
        self._all = requests
        self._requests = [one for one in requests if one.drafts]
        self._costs, self._most, self._fixed = costs, most, fixed
        self._known: dict[tuple[int, Costs], CompanyCourses] = {}
        self.plain = CompanyCourses(1, (PLAIN,) * max(1, len(requests)), 0.0)
        self.categories = [one.category for one in requests]

    def __len__(self) -> int:
        return len(self.plain.courses)

    def at(self, sequences: int, costs: Costs | None = None) -> CompanyCourses:
        """Return the courses in company of about so many. `costs`: where they are others than usual, as of a draft
        worker that others share."""
        if not self._requests or not self._most or self._fixed == 0:
            return self.plain
        key = find_company(sequences), costs or self._costs
        if key not in self._known:
            self._known[key] = self._replay(*key)
        return self._known[key]

    def _replay(self, company: int, costs: Costs) -> CompanyCourses:
        """Replay the recording again and again, each request as often as others, until the policy has settled; the
        last time counts."""
        policy: DepthPolicy = (
            Adaptive(start_cost_model(costs.forward)) if self._fixed is None else FixedDepth(self._fixed)
        )
        outputs = sum(len(one.drafts) for one in self._requests)
        times = max(1, -(-_LEAST_ROUNDS * company // outputs), -(-2 * company // len(self._requests)))
        warm = [replace(one, key=f"{one.key}/{turn}") for turn in range(times) for one in self._requests]
        if times > 1 or self._fixed is None:
            replay(warm, policy, costs, concurrency=company, most=self._most)
        played = replay(
            [*self._requests, *(replace(one, key=f"{one.key}/last") for one in self._requests[:company])],
            policy,
            costs,
            concurrency=company,
            most=self._most,
        )
        courses = tuple(_build_course(played.courses[one.key]) if one.drafts else PLAIN for one in self._all)
        full = [step for step in played.steps if step.sequences == company]
        drafting = sum(step.drafted > 0 for step in full) / max(1, len(full))
        changing = sum(one.drafted != other.drafted for one, other in pairwise(full)) / max(1, len(full))
        return CompanyCourses(company, courses, self._beside_ms(full, company, costs), drafting, changing)

    def _beside_ms(self, full: Sequence[Step], company: int, costs: Costs) -> float:
        if not full:
            return 0.0
        rows = sum(costs.rows(0) * company + step.drafted for step in full) / len(full)
        context = sum(one.prompt_tokens + len(one.drafts) / 2 for one in self._requests) / len(self._requests)
        forward_ms = costs.forward.ms(rows, company, context)
        return max(0.0, sum(step.round_ms for step in full) / len(full) - forward_ms)


def _build_course(rounds: Sequence[RequestRound]) -> Course:
    tokens = [0]
    for one in rounds:
        tokens.append(tokens[-1] + one.tokens)
    count = len(rounds)
    return Course(
        tuple(tokens), sum(one.drafted for one in rounds) / count, sum(one.accepted for one in rounds) / count
    )


def _find_nearest(sequences: int) -> int:
    place = bisect_left(COMPANIES, sequences)
    near = COMPANIES[max(0, place - 1) : place + 1]
    return min(near, key=lambda one: abs(one - sequences))


_NEAREST = tuple(_find_nearest(count) for count in range(COMPANIES[-1] + 1))


def find_company(sequences: int) -> int:
    """Return the number in COMPANIES that is nearest, the lower of two."""
    return _NEAREST[sequences] if sequences < len(_NEAREST) else COMPANIES[-1]


def draw_requests(
    acceptance: float, depth: int, outputs: int, tokens: int, draw: Callable[[], float]
) -> list[RecordedRequest]:
    """Return requests whose drafts are right with one chance each, where nothing was recorded: `outputs` of `tokens`.
    `draw` returns a number of 0 to 1. What is right at a place depends on the place alone, as with a real draft."""
    found = []
    sure = (round(acceptance, 3),) * depth
    for number in range(outputs):
        right = [draw() < acceptance for _ in range(tokens + depth)]
        drafts = []
        for place in range(tokens):
            run = next((n for n in range(depth) if not right[place + n]), depth)
            drafts.append(RecordedDraft(depth, sure, min(run, tokens - place)))
        found.append(RecordedRequest(f"drawn-{number}", tuple(drafts), "drawn", 64))
    return found
