"""How often a drafter's tokens are accepted by a target, by their place in the draft and by depth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DepthYield:
    """Rounds of at most `depth` drafts. `offered[i]`: the share of rounds whose draft had a token at place i + 1;
    `accepted[i]`: the share in which that token, and so all before it, was accepted. A round without a draft counts as
    one whose draft was rejected. `changes`: the share of rounds that ran another number of rows than
    the one before, padding included."""

    depth: int
    offered: tuple[float, ...]
    accepted: tuple[float, ...]
    rounds: int
    changes: float = 0.0

    @property
    def tokens(self) -> float:
        """Expected tokens of a round, the target's own included."""
        return 1.0 + sum(self.accepted)

    @property
    def conditional(self) -> tuple[float, ...]:
        """The chance that draft i is accepted if all before it are, for `cost.estimate_round_tokens`."""
        before = (1.0, *self.accepted)
        return tuple(now / last if last else 0.0 for last, now in zip(before, self.accepted, strict=False))


@dataclass(frozen=True, slots=True)
class PairAcceptance:
    """One drafter on one target over the texts of one workload.

    `rule`: who chose the depth. `"policy"`: by the cost of rounds in the runtime `adapter` and by what drafts are
    worth. `"fixed"`: all drafts that there are, up to the depth; `adapter` is empty. `sequences`: so many shared a
    forward. `by_depth`: in ascending order, at least one. `draft_ms`: what the drafter took for a sequence in a round,
    where it is no model (a model's time follows from its own costs). `drafter_digest`: of a draft model's files.
    """

    target: str
    target_digest: str
    drafter: str
    workload: str
    rule: str
    sequences: int
    by_depth: tuple[DepthYield, ...]
    draft_ms: float = 0.0
    measured_at: str = ""
    drafter_digest: str = ""
    adapter: str = ""

    def at(self, depth: int) -> DepthYield:
        """Return what was measured at this depth, else at the next smaller one."""
        below = [point for point in self.by_depth if point.depth <= depth]
        return below[-1] if below else self.by_depth[0]


@dataclass(frozen=True, slots=True)
class TargetTexts:
    """What a target says to the prompts of a workload, greedily: token ids. Whatever a drafter would have proposed can
    be compared with it, without the target."""

    target: str
    target_digest: str
    workload: str
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    measured_at: str = ""
