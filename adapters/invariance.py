"""Measures whether a loaded model is row-invariant, and what its bits are, instead of believing it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from adapters.contract import LoadedModel, Logits, LoraSlots, Segment

PROBE_TOKENS = 96
"""The length of the text whose bits are a class's fingerprint; so many of them are run as one segment. ADR 0040. To
change it is to change every fingerprint."""
# ADR 0040: rows that stand apart, in every fingerprint.
_PROBE_APART = 8
_PROMPT_GROUPINGS: tuple[tuple[int, ...], ...] = (
    (*range(2, 18), 31, 33, 32, 9),
    (1, 1, 1, 63, 191),
    (128, 64, 65),
    (127, 129, 1),
    (255, 2),
    (256, 1),
)
"""How one text is cut: every number of rows from 1 to 17, those around 32, 64, 128 and 256, and single last rows."""
_FAR: tuple[int, ...] = (512, 1024)
"""Positions at which runtimes take other kernels for attention, and about which they are looked at: the library of
mainline llama.cpp divides the positions of a single row from 512 on. ADR 0040, 0109."""
# Rows before such a place that groupings begin with, so that one of them crosses it.
_BEFORE = 4
_FAR_GROUPINGS: tuple[tuple[int, ...], ...] = ((*(1,) * 8, 2, 3, 4, 7), (16, 8))
_FAR_ROWS = sum(_FAR_GROUPINGS[0])
# The text before is computed in pieces of so many rows. Not tuned.
_FAR_CHUNK = 128
# ADR 0040: rows from 1 to 17, those about 32 and 64, and ragged ends.
_APART_GROUPINGS = (tuple(range(1, 17)), (17, 31, 33, 32, 23), (64, 65, 7))


# ADR 0040: groupings reach to 257 rows, where AVX2 without VNNI first differed.
_TEXT = 257
# Tokens of the prompt that rows stand apart behind. Any number does.
_PROMPT = 24
# Tokens of each sequence beside others. Any number above their prompts' does.
_COMPANY = 26
_COMPANY_PROMPTS = (5, 9, 2, 14, 1)
"""Tokens of the text, of its prompt, of each sequence that is run beside others, and of the prompts of these."""


def find_variance(model: LoadedModel, *, far: bool = True) -> str:
    """Return where a row's bits first depend on how many rows are run with it, as in "5 rows at a time"; "" where they
    never do. `far`: at far positions, too.

    One text is run whole and in several groupings, rows behind a prompt by the single-row kernel. Ragged sequences are
    run together. Some rows are run at far positions, as far as the context and the KV cache go. Uses the first slots,
    free before and after, and some 150 forwards. Raises what `LoadedModel.forward` raises.
    """
    caps = model.capabilities
    room = min(caps.max_batch_rows, caps.max_context_tokens, caps.total_blocks * caps.block_tokens) - 2
    text = probe_text(model, min(_TEXT, room))
    return (
        _vary_prompt(model, text)
        or _vary_outputs(model, text)
        or _vary_apart(model, text)
        or _vary_company(model, text)
        or (_vary_far(model) if far and caps.rewinds else "")
    )


def probe_text(model: LoadedModel, count: int) -> list[int]:
    """Return the first `count` tokens of the text that fingerprints are made of."""
    return [(7 * i * i + 11 * i + 3) % model.spec.vocabulary_size for i in range(count)]


@dataclass(frozen=True, slots=True)
class Probe:
    """What a model says of a fixed text: the `logits` of one segment, shape (tokens, outputs), and a digest of their
    bits, the SHA-1 of the float32 rows. Behind a dash follows that of rows of the single-row kernel.

    Models with one `fingerprint` are interchangeable to the bit.
    """

    tokens: list[int]
    logits: Logits
    fingerprint: str


def fingerprint_bits(model: LoadedModel) -> str:
    """Return the fingerprint of a model's probe, and behind it those of its LoRA adapters. Slots are free before and
    after. Raises what `LoadedModel.forward` raises."""
    return join_fingerprints([run_probe(model).fingerprint for _ in each_lora(model)])


def join_fingerprints(fingerprints: Sequence[str]) -> str:
    """Return one for all: the model's own, and behind a plus a digest of those with its adapters."""
    own, *others = fingerprints
    digest = hashlib.sha1("+".join(others).encode(), usedforsecurity=False).hexdigest()[:12]
    return f"{own}+{digest}" if others else own


def each_lora(model: LoadedModel) -> Iterator[str]:
    """Yield "" for the model as it is, and then each of its LoRA adapters, with which all slots compute meanwhile.
    Slots are free before and after."""
    yield ""
    if not isinstance(model, LoraSlots) or not model.loras:
        return
    slots = range(model.capabilities.slots)
    try:
        for name in model.loras:
            for slot in slots:
                model.use_lora(slot, name)
            yield name
    finally:
        for slot in slots:
            model.release(slot)
            model.use_lora(slot, "")


def run_probe(model: LoadedModel) -> Probe:
    """Run the text that fingerprints are made of, at most PROBE_TOKENS of it. Slot 0 is free before and after. Raises
    what `LoadedModel.forward` raises."""
    caps = model.capabilities
    room = min(caps.max_batch_rows, caps.max_context_tokens, caps.total_blocks * caps.block_tokens)
    text = probe_text(model, PROBE_TOKENS + _PROBE_APART)
    count = min(PROBE_TOKENS, room - _PROBE_APART)
    try:
        logits = model.forward([Segment(0, 0, text[:count], (0, count))]).logits.copy()
        digests = [_digest(logits)]
        if caps.apart_tokens:
            part = Segment(0, count, text[count : count + _PROBE_APART], (0, _PROBE_APART), apart=True)
            digests.append(_digest(model.forward([part]).logits))
    finally:
        model.release(0)
    return Probe(text[:count], logits, "-".join(digests))


def _digest(logits: Logits) -> str:
    rows = np.ascontiguousarray(logits, np.float32).tobytes()
    return hashlib.sha1(rows, usedforsecurity=False).hexdigest()[:12]


def same_bits(left: Logits, right: Logits) -> bool:
    """Return whether two arrays are the same to the bit, and hold no NaN: that is equal to nothing."""
    return np.array_equal(left.view(np.uint32), right.view(np.uint32)) and bool(np.isfinite(left).all())


def _vary_prompt(model: LoadedModel, text: list[int]) -> str:
    whole = _run(model, text, (len(text),), prompt=len(text))
    for grouping in dict.fromkeys(_fit_length(length, len(text)) for length in _PROMPT_GROUPINGS):
        problem = _compare(model, text, grouping, whole, prompt=len(text))
        if problem:
            return problem
    return ""


def _vary_outputs(model: LoadedModel, text: list[int]) -> str:
    """Compare rows whose logits are wanted alone with those that are wanted together."""
    count = _PROMPT
    apart = model.capabilities.apart_tokens > 0
    batches = [
        [Segment(0, 0, text[:count], (0, count))],
        [Segment(0, count, text[count : count + 4], (0, 4), apart)],
    ]
    for batch in batches:
        first = batch[0]
        count = len(first.tokens)
        whole = model.forward(batch).logits.copy()
        for row in (0, count // 2, count - 1):
            if not model.capabilities.rewinds:
                model.release(0)
                for before in (batch for batch in batches[:1] if first.start):
                    model.forward(before)
            alone = model.forward([Segment(0, first.start, first.tokens, (row, row + 1), first.apart)]).logits
            if not same_bits(alone[-1:].copy(), whole[row : row + 1]):
                model.release(0)
                return f"logits of one row of {count} wanted, not of all"
    model.release(0)
    return ""


def _vary_apart(model: LoadedModel, text: list[int]) -> str:
    if not model.capabilities.apart_tokens:
        return ""
    text = text[: _PROMPT + sum(_APART_GROUPINGS[0])]
    whole = _run(model, text, (_PROMPT, len(text) - _PROMPT), prompt=_PROMPT)
    for grouping in _APART_GROUPINGS:
        fitted = (_PROMPT, *_fit_length(grouping, len(text) - _PROMPT))
        problem = _compare(model, text, fitted, whole, prompt=_PROMPT)
        if problem:
            return f"{problem} behind a prompt"
    return ""


def _compare(model: LoadedModel, text: list[int], grouping: tuple[int, ...], whole: Logits, *, prompt: int) -> str:
    rows = _run(model, text, grouping, prompt=prompt)
    for start, stop in pairwise((0, *accumulate(grouping))):
        if not same_bits(rows[start:stop], whole[start:stop]):
            return f"{stop - start} rows at a time, not {len(text) if start < prompt else len(text) - prompt}"
    return ""


def _vary_far(model: LoadedModel) -> str:
    """Compare rows about far positions in several groupings, and beside another sequence. What stands before them is
    computed once."""
    caps = model.capabilities
    room = min(caps.max_context_tokens, (caps.total_blocks - 1) * caps.block_tokens)  # a block is the neighbour's
    places = [place for place in _FAR if place - _BEFORE + _FAR_ROWS <= room]
    text = probe_text(model, max(places, default=0) + _FAR_ROWS)
    chunk, held = min(_FAR_CHUNK, caps.max_batch_rows - 2), 0
    try:
        for begin in (place - _BEFORE for place in places):
            for start in range(held, begin, chunk):
                part = text[start : min(start + chunk, begin)]
                model.forward([Segment(0, start, part, (0, 0))])
            held = begin + _FAR_ROWS
            for apart in (False, True) if caps.apart_tokens else (False,):
                problem = _vary_rows(model, text[begin:held], begin, apart=apart)
                if problem:
                    return f"{problem}, {begin} positions behind the beginning"
    finally:
        _release(model, min(2, caps.slots))
    return ""


def _vary_rows(model: LoadedModel, tokens: list[int], begin: int, *, apart: bool) -> str:
    """Compare rows of a slot that holds what stands before them."""
    count = min(len(tokens), model.capabilities.max_batch_rows - 2)
    own = Segment(0, begin, tokens[:count], (0, count), apart=apart)
    whole = model.forward([own]).logits.copy()
    if model.capabilities.slots > 1:
        beside = model.forward([own, Segment(1, 0, tokens[:1], (0, 1))]).logits
        if not same_bits(beside[:count], whole):
            return f"{count} rows beside another sequence"
    for grouping in _FAR_GROUPINGS:
        for at, end in pairwise((0, *accumulate(_fit_length(grouping, count)))):
            part = Segment(0, begin + at, tokens[at:end], (0, end - at), apart=apart)
            if not same_bits(model.forward([part]).logits, whole[at:end]):
                return f"{end - at} rows at a time, not {count}"
    return ""


def _fit_length(grouping: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Return a grouping cut, or drawn out with what is left, to a text's length."""
    fitted: list[int] = []
    for size in grouping:
        if sum(fitted) + size > length:
            break
        fitted.append(size)
    left = length - sum(fitted)
    return (*fitted, left) if left else tuple(fitted)


def _run(model: LoadedModel, text: list[int], grouping: Sequence[int], *, prompt: int) -> Logits:
    """Return all rows of a text, fed in groups; those behind the prompt by the single-row kernel."""
    rows = []
    for start, end in pairwise((0, *accumulate(grouping))):
        segment = Segment(0, start, text[start:end], (0, end - start), apart=start >= prompt)
        rows.append(model.forward([segment]).logits.copy())
    model.release(0)
    return np.concatenate(rows)


def _vary_company(model: LoadedModel, text: list[int]) -> str:
    """Compare sequences that are run beside one another, prompts and decoding rows mixed, with each alone."""
    prompts = _COMPANY_PROMPTS[: model.capabilities.slots]
    texts = [text[7 * slot : 7 * slot + _COMPANY] for slot in range(len(prompts))]
    texts = [part for part in texts if len(part) == _COMPANY]
    apart = [prompt if model.capabilities.apart_tokens else _COMPANY for prompt in prompts]
    alone = [
        _run(model, part, (prompt, _COMPANY - prompt), prompt=begins)
        for part, prompt, begins in zip(texts, prompts, apart, strict=False)
    ]
    for batch in _iterate_ragged(texts, prompts, apart):
        rows = model.forward(batch).logits
        at = 0
        for segment in batch:
            count = len(segment.tokens)
            if not same_bits(rows[at : at + count], alone[segment.slot][segment.start : segment.start + count]):
                _release(model, len(texts))
                return f"{count} rows beside {len(batch) - 1} other sequences"
            at += count
    _release(model, len(texts))
    return ""


def _iterate_ragged(texts: list[list[int]], prompts: Sequence[int], apart: Sequence[int]) -> Iterator[list[Segment]]:
    """Yield batches in which each sequence comes from its own place on, by one to four tokens. `apart`: where rows of
    the single-row kernel begin."""
    held, step = [0] * len(texts), 0
    while any(count < len(part) for count, part in zip(held, texts, strict=True)):
        batch = []
        for slot, part in enumerate(texts):
            ends = len(part) if held[slot] >= prompts[slot] else prompts[slot]
            count = min(1 + (3 * slot + step * (slot + 1)) % 4, ends - held[slot])
            if count and (slot <= step):
                tokens, alone = part[held[slot] : held[slot] + count], held[slot] >= apart[slot]
                batch.append(Segment(slot, held[slot], tokens, (0, count), apart=alone))
                held[slot] += count
        step += 1
        yield batch


def _release(model: LoadedModel, slots: int) -> None:
    for slot in range(slots):
        model.release(slot)
