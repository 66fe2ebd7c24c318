"""What typical sampling and XTC leave of the tokens that min-p, top-k and top-p left.

Typical sampling (Meister et al., "Locally Typical Sampling", arXiv 2202.00666, section 3) keeps the tokens whose
information is nearest to the entropy, the nearest first, until their mass exceeds `typical_p`.

XTC ("exclude top choices", p-e-w, oobabooga/text-generation-webui pull request 6335) drops, with the chance
`xtc_probability`, all tokens of `xtc_threshold` or more but the least likely of them.

Both are llama.cpp's (src/llama-sampler.cpp, `llama_sampler_typical_apply`, `llama_sampler_xtc_apply`), but for two
things: they come behind the temperature, as all filters here do, and XTC's draw is a function of seed and position. So
a draft that looks at a position meets the same draw as the target.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.sampling import noise
from policies.sampling.params import Sampling

# llama.cpp: no two tokens can have more than half.
_MOST_THRESHOLD = 0.5


def narrow_tokens(
    ids: NDArray[np.uint32], nats: NDArray[np.float64], sampling: Sampling, position: int
) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Return the ids and nats that are left, in their order; at least one is. Both have the shape (n,); nats are
    log-probabilities up to a constant."""
    if sampling.typical_p < 1.0:
        kept = _find_typical(nats, sampling.typical_p)
        ids, nats = ids[kept], nats[kept]
    if sampling.xtc_probability > 0.0 and len(ids) > 1 and _draws_exclusion(sampling, position):
        left = _exclude_top(nats, sampling.xtc_threshold)
        ids, nats = ids[left], nats[left]
    return ids, nats


def _draws_exclusion(sampling: Sampling, position: int) -> bool:
    """Whether top choices are excluded at a position."""
    return noise.single(sampling.seed, position, noise.Purpose.EXCLUDE) <= sampling.xtc_probability


def _find_typical(nats: NDArray[np.float64], mass: float) -> NDArray[np.intp]:
    logs = nats - np.log(np.exp(nats).sum())
    shares = np.exp(logs)
    entropy = -float(np.add.reduce(shares * logs))
    order = np.abs(logs + entropy).argsort(kind="stable")  # quick where the likeliest come first: two runs are merged
    count = int(np.cumsum(shares[order]).searchsorted(mass, side="right")) + 1
    return np.sort(order[:count])


def _exclude_top(nats: NDArray[np.float64], threshold: float) -> NDArray[np.bool_]:
    shares = np.exp(nats)
    kept = np.ones(len(nats), np.bool_)
    top = np.flatnonzero(shares >= threshold * shares.sum()) if threshold <= _MOST_THRESHOLD else ()
    if len(top) > 1:
        kept[top] = False
        kept[top[nats[top].argmin()]] = True
    return kept
