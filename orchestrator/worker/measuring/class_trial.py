"""Tries a loaded model in one numerical class: is it sane, do rows keep their bits; and times those that are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from adapters.brief_invariance import find_brief_variance
from adapters.contract import Exactness, LoadedModel, Logits, Segment
from adapters.decoder.short_text import ShortText, log_softmax
from adapters.invariance import each_lora, find_variance, join_fingerprints, run_probe
from device_profiles.numerical_class import MIXED_ROWS, ClassFinding, mix_ms
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
# Of all classes in turn. With three, a load that comes or goes in one of them decides nothing. ADR 0040.
_ROUNDS = 3
PROMPT = 0
"""In place of a number of rows: a prompt is timed."""


def try_class(
    model: LoadedModel, text: ShortText | None, load_s: float, *, brief: bool = False, far: bool = True
) -> ClassFinding:
    """Return what came of it, with each LoRA adapter too, but for what it costs. Slots are free before and after.
    `brief`: by few forwards. `far`: at far positions, too. Raises what `LoadedModel.forward` raises."""
    caps, problem, fingerprints = model.capabilities, "", list[str]()
    agreement: float | None = None
    for lora in each_lora(model):
        probe = run_probe(model)
        if lora:  # the text is what the model says without
            problem, _ = find_insanity(model, None, probe.logits)
        else:
            problem, agreement = find_insanity(model, text, probe.logits)
        fingerprints.append("" if problem else probe.fingerprint)
        if not problem and caps.exactness is Exactness.BIT:
            variance = find_brief_variance(model, probe) if brief else find_variance(model, far=far)
            problem = f"bits depend on the batch: {variance}" if variance else ""
        if problem:
            problem += f" (with the adapter {lora})" if lora else ""
            break
    return ClassFinding(
        caps.numerical_class,
        not problem,
        problem or "sane" + _describe_invariance(caps.exactness, brief=brief),
        fingerprint=join_fingerprints(fingerprints) if all(fingerprints) else "",
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
    answer = text.tokens[text.seed :]
    sayable = [place for place, token in enumerate(answer) if not ids or token in ids]
    if not sayable:
        return "", None
    chosen = [ids.get(answer[place], answer[place]) for place in sayable]
    rows = log_softmax(logits[text.seed - 1 : -1])[sayable]
    agreement = float(np.mean(rows.argmax(axis=1) == chosen))
    loss = float(np.mean(np.asarray(text.log_probabilities)[sayable] - rows[np.arange(len(chosen)), chosen]))
    if agreement < LEAST_AGREEMENT or loss > MOST_LOSS_NATS:
        return (
            f"{agreement:.0%} of the choices of a float32 reference, which are {loss:.1f} nats less likely",
            agreement,
        )
    return "", agreement


class CostMeter:
    """Times one forward after the other, so that several models can take turns. `prompt_tokens`: of the prompt."""

    def __init__(self, model: LoadedModel, clock: Clock) -> None:
        self._model, self._clock = model, clock
        caps = model.capabilities
        room = min(caps.max_batch_rows, caps.max_context_tokens, caps.total_blocks * caps.block_tokens)
        self.prompt_tokens = min(_PREFILL_TOKENS, room - MIXED_ROWS[-1][0])
        self._held = 0

    def measure_ms(self, rows: int) -> float:
        """Return the milliseconds of a decoding forward of one sequence of so many rows, or of a prompt for PROMPT.
        Behind a prompt nothing is held, behind all else a slot is. Raises what `LoadedModel.forward` raises."""
        model = self._model
        if rows == PROMPT:
            self.release_slot()
            took_ms = forward_ms(model, [segment(model, 0, 0, self.prompt_tokens, prompt=True)], self._clock)
            model.release(0)
            return took_ms
        if not self._held:
            self._held = min(_HELD, self.prompt_tokens)
            model.forward([segment(model, 0, 0, self._held, prompt=True)])
        batch = [segment(model, 0, self._held, rows, prompt=False)]
        forward_ms(model, batch, self._clock)  # the first one of another number of rows takes longer
        return forward_ms(model, batch, self._clock)

    def release_slot(self) -> None:
        if self._held:
            self._model.release(0)
            self._held = 0


class ClassCosts(NamedTuple):
    """Milliseconds, as in ClassFinding."""

    decode_ms: tuple[tuple[int, float], ...]
    prefill_ms: float
    rounds_ms: tuple[float, ...]


def time_in_turns(measures: Sequence[Callable[[int], float]]) -> list[ClassCosts]:
    """Return what each costs. They take turns by the forward, so that whatever else the machine does slows all down
    alike; who is first changes with each round. Raises what they raise."""
    times: list[list[dict[int, float]]] = [[{} for _ in range(_ROUNDS)] for _ in measures]
    for number in range(_ROUNDS):
        turn = list(zip(measures, times, strict=True))[:: -1 if number % 2 else 1]
        for rows in (PROMPT, *(rows for rows, _ in MIXED_ROWS)):
            for measure, its in turn:
                its[number][rows] = measure(rows)
    return [_sum_up(its) for its in times]


def _sum_up(rounds: Sequence[Mapping[int, float]]) -> ClassCosts:
    middle = {rows: median(times[rows] for times in rounds) for rows in rounds[0]}
    decode_ms = tuple((rows, middle[rows]) for rows, _ in MIXED_ROWS)
    return ClassCosts(decode_ms, middle[PROMPT], tuple(mix_ms(times, times[PROMPT]) for times in rounds))
