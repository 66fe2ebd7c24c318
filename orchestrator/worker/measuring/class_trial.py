"""Tries a loaded model in one numerical class: is it sane, do rows keep their bits, what does it cost."""

from __future__ import annotations

from statistics import median

import numpy as np

from adapters.brief_invariance import find_brief_variance
from adapters.contract import Exactness, LoadedModel, Logits, Segment
from adapters.decoder.short_text import ShortText, log_softmax
from adapters.invariance import find_variance, run_probe
from device_profiles.numerical_class import MIXED_ROWS, ClassFinding
from orchestrator.clock import Clock
from orchestrator.worker.measuring.steps import forward_ms, segment

LEAST_AGREEMENT = 0.5
"""Of the reference's greedy choices: weights of 4 bits keep two of three or more, garbage keeps none. ADR 0040."""
MOST_LOSS_NATS = 1.5
"""How much less likely than to the reference its choices may be in the mean. ADR 0040. Not tuned: garbage is off by the
logarithm of the vocabulary's size, 10 or more."""
# ADR 0040: cost is of forwards of 1 to 16 rows and of a prompt of 256.
_PREFILL_TOKENS = 256
# Positions behind which forwards are timed (ADR 0040). Not tuned.
_HELD = 64
# The median of all but the first (ADR 0040). Not tuned.
_RUNS = 7


def try_class(
    model: LoadedModel, text: ShortText | None, clock: Clock, load_s: float, *, brief: bool = False, far: bool = True
) -> ClassFinding:
    """Return what came of it. Slots are free before and after. `brief`: by few forwards, and without what it costs.
    `far`: at far positions, too. Raises what `LoadedModel.forward` raises."""
    caps = model.capabilities
    probe = run_probe(model)
    problem, agreement = find_insanity(model, text, probe.logits)
    fingerprint = "" if problem else probe.fingerprint
    decode_ms, prefill_ms, prefill_tokens = ((), 0.0, 0) if problem or brief else measure_costs(model, clock)
    if not problem and caps.exactness is Exactness.BIT:
        variance = find_brief_variance(model, probe) if brief else find_variance(model, far=far)
        problem = f"bits depend on the batch: {variance}" if variance else ""
    return ClassFinding(
        caps.numerical_class,
        not problem,
        problem or "sane" + _describe_invariance(caps.exactness, brief=brief),
        fingerprint=fingerprint,
        decode_ms=decode_ms,
        prefill_ms=prefill_ms,
        prefill_tokens=prefill_tokens,
        agreement=agreement,
        load_s=round(load_s, 2),
    )


def _describe_invariance(exactness: Exactness, *, brief: bool) -> str:
    if exactness is not Exactness.BIT:
        return ""
    return f", bits do not depend on the batch{' in a short check' if brief else ''}"


def find_insanity(model: LoadedModel, text: ShortText | None, logits: Logits) -> tuple[str, float | None]:
    """Return what is wrong with a model's logits ("" where nothing is), and its share of the reference's choices.
    Without a `text` of the reference, `logits` of any text are looked at."""
    if text is not None:
        logits = model.forward([Segment(0, 0, text.tokens, (0, len(text.tokens)))]).logits.copy()
        model.release(0)
    wanted = (len(logits) if text is None else len(text.tokens), model.spec.outputs)
    if logits.shape != wanted:
        return f"logits of shape {logits.shape} instead of {wanted}", None
    if not np.isfinite(logits).all():
        return "logits are not finite", None
    if text is None:
        return "", None
    ids = {token: place for place, token in enumerate(model.spec.output_ids)}
    chosen = [ids.get(token, token) for token in text.tokens[text.seed :]]
    rows = log_softmax(logits[text.seed - 1 : -1])
    agreement = float(np.mean(rows.argmax(axis=1) == chosen))
    loss = float(np.mean(np.asarray(text.log_probabilities) - rows[np.arange(len(chosen)), chosen]))
    if agreement < LEAST_AGREEMENT or loss > MOST_LOSS_NATS:
        return (
            f"{agreement:.0%} of the choices of a float32 reference, which are {loss:.1f} nats less likely",
            agreement,
        )
    return "", agreement


def measure_costs(model: LoadedModel, clock: Clock) -> tuple[tuple[tuple[int, float], ...], float, int]:
    """Return the median milliseconds of decoding forwards by their rows, and of a prompt, with its tokens."""
    caps = model.capabilities
    room = min(caps.max_batch_rows, caps.max_context_tokens, caps.total_blocks * caps.block_tokens)
    count = min(_PREFILL_TOKENS, room - MIXED_ROWS[-1][0])
    held = min(_HELD, count)
    prompt = segment(model, 0, 0, count, prompt=True)
    prefill = []
    for _ in range(3):
        prefill.append(forward_ms(model, [prompt], clock))
        model.release(0)
    model.forward([segment(model, 0, 0, held, prompt=True)])
    decode = []
    for rows, _ in MIXED_ROWS:
        batch = [segment(model, 0, held, rows, prompt=False)]
        # The first forward of another number of rows takes longer.
        decode.append((rows, median([forward_ms(model, batch, clock) for _ in range(_RUNS)][1:])))
    model.release(0)
    return tuple(decode), median(prefill), count
