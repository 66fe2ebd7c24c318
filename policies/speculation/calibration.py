"""What a drafter's own probability of a token says about the chance that the target accepts it.

A drafter is surer than it should be, by how much depends on the pair and on the text. So outcomes are counted by bucket
of the probability, older ones fading. A bucket's rate takes the place of the probability as outcomes come in: chance =
(accepted + PRIOR * probability) / (seen + PRIOR). That is the mean of a Beta posterior whose prior is the draft's own
word, worth PRIOR outcomes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Upper ends of all buckets but the last: finer where drafting goes on. ADR 0016. One calibration less costs 0.4 to 1.0
%, and 5.5 % at most (ADR 0045); the edges alone were not tuned."""
# Outcomes that the draft's own word counts as (ADR 0016). Not tuned apart from the calibration.
PRIOR = 6.0
MEMORY = 200.0
"""So many outcomes a bucket remembers: older ones fade. ADR 0016. Not tuned apart."""

_BUCKETS = len(EDGES) + 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """Outcomes `seen` and those `accepted`, by bucket of the draft's own probability."""

    seen: tuple[float, ...] = (0.0,) * _BUCKETS
    accepted: tuple[float, ...] = (0.0,) * _BUCKETS


def chance(calibration: Calibration, probability: float) -> float:
    """Return the chance that a token is accepted to which its draft model gave `probability` (0 to 1)."""
    bucket = bisect_right(EDGES, probability)
    return estimate_rate(calibration.accepted[bucket], calibration.seen[bucket], probability, PRIOR)


def usual_chance(calibration: Calibration) -> float:
    """Return how often tokens are accepted whose predecessors were, whatever probability they had; near 1 at first."""
    return estimate_rate(sum(calibration.accepted), sum(calibration.seen), 1.0, PRIOR)


def observe_token_outcome(calibration: Calibration, probability: float, accepted: bool) -> Calibration:
    """Return the calibration with one more outcome: of a token whose predecessors were all accepted."""
    counts = list(calibration.seen), list(calibration.accepted)
    count_outcome(*counts, bisect_right(EDGES, probability), right=accepted)
    return Calibration(tuple(counts[0]), tuple(counts[1]))


def observe_draft_outcome(
    calibration: Calibration, proposed: Sequence[int], probabilities: Sequence[float], committed: Sequence[int]
) -> Calibration:
    """Return the calibration after a verdict: what was proposed against what was committed, up to the first token that
    was wrong. Proposals that were not verified count too, as far as the target went the same way without them."""
    seen, accepted = list(calibration.seen), list(calibration.accepted)
    for token, probability, chosen in zip(proposed, probabilities, committed, strict=False):
        count_outcome(seen, accepted, bisect_right(EDGES, probability), right=token == chosen)
        if token != chosen:
            break
    return Calibration(tuple(seen), tuple(accepted))


def count_outcome(seen: list[float], accepted: list[float], kind: int, *, right: bool, memory: float = MEMORY) -> None:
    """Add an outcome of a kind to the counts of each kind, of which so many outcomes are remembered."""
    before = seen[kind]
    fade = (memory - 1.0) / before if before > memory - 1.0 else 1.0
    seen[kind] = before * fade + 1.0
    accepted[kind] = accepted[kind] * fade + right


def estimate_rate(accepted: float, seen: float, prior: float, weight: float) -> float:
    """Return the mean of a Beta posterior whose prior is worth so many outcomes."""
    return (accepted + weight * prior) / (seen + weight)
