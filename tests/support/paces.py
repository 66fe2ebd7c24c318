"""What replicas of a small fleet show together, reckoned anew from all of them."""

from __future__ import annotations

from collections.abc import Sequence

from policies.serving.replica_load import PairPaces, ReplicaPace, add_paces, reckon_saved_ms, reckon_tpot_ms

_TRIED = 15.0


def predict_saved_ms(own: PairPaces, alike: Sequence[PairPaces], draft: str, sequences: int) -> float:
    """Return what a draft saves of a token's time, by the replicas on devices that are alike (this one among them). One
    that was hardly seen at work is taken for a good one."""
    drafted = add_paces([load.drafted[draft] for load in alike if draft in load.drafted])
    plain = [load.plain for load in alike]
    plain_ms = predict_tpot_ms(own.plain, plain, sequences)
    shared_ms = add_paces(plain).tpot_ms(sequences)
    if drafted.weight < _TRIED:
        return 0.6 * plain_ms if sequences == 1 else 0.0
    return reckon_saved_ms(own.drafted.get(draft), drafted, plain_ms, shared_ms, drafted.tpot_ms(sequences))


def predict_tpot_ms(pace: ReplicaPace, all_paces: Sequence[ReplicaPace], sequences: int) -> float:
    """Return the TPOT to reckon with: what all replicas show together, unless this one is clearly another kind."""
    return reckon_tpot_ms(pace.tpot_ms(sequences), add_paces(all_paces).tpot_ms(sequences), sequences)
