"""The sparse rows that drawn tokens come from, as they cross the link: 8 bytes a candidate, bounded, and checked."""

from __future__ import annotations

import msgspec
import numpy as np

from policies.sampling import PROPOSAL_WIDTH, DraftDistribution

_TOKEN = np.dtype("<u4")
_SHARE = np.dtype("<f4")


class NoDistribution(Exception):
    """What came is not what a token can have been drawn from."""


class SparseRow(msgspec.Struct, frozen=True, array_like=True):
    """See policies.sampling.DraftDistribution: ids (little-endian uint32) and their shares (little-endian float32)."""

    tokens: bytes
    shares: bytes


def pack_proposal(proposal: DraftDistribution | None) -> SparseRow | None:
    """Return a proposal as it travels; None, of a token that was not drawn, is None."""
    if proposal is None:
        return None
    return SparseRow(proposal.tokens.astype(_TOKEN).tobytes(), proposal.shares.astype(_SHARE).tobytes())


def unpack_proposal(row: SparseRow | None, drawn: int, vocabulary: int) -> DraftDistribution | None:
    """Return what `drawn` was drawn from: to the bit what was packed. Raises NoDistribution."""
    if row is None:
        return None
    if len(row.tokens) != len(row.shares) or len(row.tokens) % _TOKEN.itemsize:
        raise NoDistribution("a row's tokens and shares do not go together")
    if len(row.tokens) > PROPOSAL_WIDTH * _TOKEN.itemsize:
        raise NoDistribution(f"a row is wider than {PROPOSAL_WIDTH} tokens")
    ids = np.frombuffer(row.tokens, _TOKEN).astype(np.uint32, copy=False)
    proposal = DraftDistribution(ids, np.frombuffer(row.shares, _SHARE).astype(np.float32, copy=False))
    probabilities = proposal.probabilities(vocabulary)
    if probabilities is None:
        raise NoDistribution("a row is no distribution over its vocabulary")
    if not probabilities[ids == drawn].sum() > 0.0:
        raise NoDistribution(f"token {drawn} cannot have been drawn from its row")
    return proposal
