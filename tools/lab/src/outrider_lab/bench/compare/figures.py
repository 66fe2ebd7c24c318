"""The figures of a comparison, made of answers: nothing here runs anything."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from device_profiles.units import MS_PER_S
from outrider_lab.bench.compare.pairs import Pair, compare_pairs, divide
from outrider_lab.peers.contract import Answer, Score

OUTRIDER, CONTROL, PLAIN, SPECULATIVE = "outrider", "control", "plain", "speculative"
BASE = f"{OUTRIDER} {PLAIN}"
RATIOS = ("tok_s", "tpot", "ttft", "at_once_tok_s")

FORMULAS = {
    "fastest": "of the passes over a prompt the one with the least latency counts: disturbances only make it longer",
    "ttft_ms": "mean time from the call to the first token",
    "tpot_ms": "sum(latency - TTFT) / sum(n - 1) over all prompts with n > 1 tokens",
    "tok_s": "generated tokens / sum of latencies, one request at a time, prefill included",
    "at_once_tok_s": "generated tokens / time until the last of a wave ended, summed over waves (the fastest pass)",
    "acceptance_rate": "accepted / drafted tokens, where the engine tells",
    "mean_acceptance_length": "1 + accepted / forwards of the target that verified, where the engine tells",
    "perplexity": "exp(-mean log-probability of the next token) over prompts and the float32 reference's answers",
    "perplexity_ratio": "perplexity / the float32 reference's over the same texts",
    "choice_agreement": "share of the answers' positions, teacher-forced, where it chooses the reference's token",
    "agreement": "tokens that an engine's own answers share with the reference's from the beginning / the reference's",
    "same_as_plain": "share of prompts whose answer is that of the same engine's plain mode, token for token",
    "same_again": "share of prompts whose answer is the same in every pass, alone",
    "same_in_company": "share of prompts whose answer among others is the answer alone",
    "peak_bytes": "most resident memory of the engine's process and its own (VmHWM), conversions at load included",
    "joules_per_token": "energy of the device while the engine worked alone / its tokens",
    "pair": "an engine's rate over the geometric mean of Outrider plain's for the same prompt, before it and behind",
    "vs_outrider": "geometric mean over prompts of a prompt's median pair (TPOT, TTFT: of rates); above 1: better",
    "beside_peers": "Outrider's vs_outrider over that of the other engine's best mode for that rate; above 1: better",
    "vs_best_peer_N": "Outrider as configured, N requests together, over the engine that is the best of all: tokens/s",
    "tpot_vs_best_peer": "the same of tokens behind the first, one request at a time; ttft_vs_best_peer: of the first",
    "plain_tpot_to_peer": "time of a token behind the first, Outrider plain over the fastest plain peer; below 1 wins",
    "worst_category_vs_peer": "the least of the categories' ratios of tokens/s to that engine, one request at a time",
    "drafts_vs_plain_N": "Outrider with drafts over without them, N requests together: tokens/s",
    "quartiles": "lower and upper quartile of the ratios of all pairs: prompts differ, and so does the machine's noise",
    "interval": "95 % bootstrap interval of a ratio, pairs drawn within prompts: what a repetition may show",
    "control": "Outrider plain once more, in a process of its own: its distance to 1 is the machine's noise",
}


@dataclass(slots=True)
class EngineRun:
    """What one engine in one mode gave. `alone`: for each pass the answers by prompt; `company`: answers by prompt of
    waves that took `company_s` together. `pairs`: each answer and wave beside Outrider's plain mode. `notes`: why a
    figure is missing, by its name."""

    engine: str
    mode: str
    state: str = "measured"
    reason: str = ""
    described: dict[str, str] = field(default_factory=dict)
    load_s: float | None = None
    peak_bytes: int | None = None
    alone: list[dict[str, Answer]] = field(default_factory=list)
    company: dict[str, Answer] = field(default_factory=dict)
    company_s: float = 0.0
    pairs: list[Pair] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    joules: float | None = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.mode}"

    @property
    def fastest(self) -> dict[str, Answer]:
        """Of each prompt the answer with the least latency."""
        found: dict[str, Answer] = {}
        for one in self.alone:
            for key, answer in one.items():
                if key not in found or answer.last_s < found[key].last_s:
                    found[key] = answer
        return found


@dataclass(frozen=True, slots=True)
class ReferenceAnswers:
    """What the float32 reference said: its answers by prompt, the texts that engines are scored on, where the answer
    begins in each (the first row that says a token of it), and the reference's perplexity over them."""

    answers: dict[str, list[int]]
    texts: list[list[int]]
    begins: list[int]
    perplexity: float


def speeds(answers: Sequence[Answer]) -> dict[str, float]:
    """Return TTFT, TPOT and tokens/s of requests that ran one at a time."""
    several = [one for one in answers if one.generated > 1]
    steps = sum(one.generated - 1 for one in several)
    latency_s = sum(one.last_s for one in answers)
    return {
        "ttft_ms": fmean(one.first_s for one in answers) * MS_PER_S if answers else 0.0,
        "tpot_ms": divide(sum(one.last_s - one.first_s for one in several) * MS_PER_S, steps),
        "tok_s": divide(sum(one.generated for one in answers), latency_s),
    }


def summarise_engine(
    run: EngineRun, categories: Mapping[str, str], reference: ReferenceAnswers | None
) -> dict[str, Any]:
    """Return one row; `categories` are those of the prompts by key. What was not measured is None."""
    row: dict[str, Any] = {"engine": run.engine, "mode": run.mode, "state": run.state, "reason": run.reason}
    row |= {"runs": run.described, "load_s": run.load_s, "peak_bytes": run.peak_bytes, "notes": run.notes}
    fastest = run.fastest
    if not fastest:
        return row
    row |= speeds(list(fastest.values())) | {"tokens": sum(one.generated for one in fastest.values())}
    row |= acceptance(list(fastest.values()))
    row["at_once_tok_s"] = (
        divide(sum(one.generated for one in run.company.values()), run.company_s) if run.company else None
    )
    row |= quality(run, reference)
    row["same_again"] = _same_again(run.alone)
    row["same_in_company"] = _share_same(run.company, fastest) if run.company else None
    total = sum(answer.generated for one in run.alone for answer in one.values())
    row["joules_per_token"] = None if run.joules is None else divide(run.joules, total)
    by_category: dict[str, list[Answer]] = defaultdict(list)
    for key, answer in fastest.items():
        by_category[categories[key]].append(answer)
    row["categories"] = {name: speeds(found) for name, found in sorted(by_category.items())}
    return row


def acceptance(answers: Sequence[Answer]) -> dict[str, float | None]:
    """Return what is known of drafts: None for what the engine does not tell."""
    stepped = [one for one in answers if one.steps]
    drafted = [one for one in answers if one.drafted is not None and one.accepted is not None]
    tried = sum(one.drafted or 0 for one in drafted)
    return {
        "acceptance_rate": sum(one.accepted or 0 for one in drafted) / tried if tried else None,
        "mean_acceptance_length": (
            1.0 + sum(one.accepted or 0 for one in stepped) / sum(one.steps or 0 for one in stepped)
            if stepped
            else None
        ),
    }


def quality(run: EngineRun, reference: ReferenceAnswers | None) -> dict[str, float | None]:
    """Return what an engine's numbers say beside the reference's."""
    found: dict[str, float | None] = dict.fromkeys(
        ("perplexity", "perplexity_ratio", "choice_agreement", "agreement"), None
    )
    if reference is None:
        return found
    if run.scores:
        perplexity = math.exp(-fmean(value for score in run.scores for value in score.log_probabilities))
        found |= {"perplexity": perplexity, "perplexity_ratio": perplexity / reference.perplexity}
        same = [
            choice == token
            for score, text, begin in zip(run.scores, reference.texts, reference.begins, strict=True)
            if score.choices is not None
            for choice, token in zip(score.choices[begin:], text[begin + 1 :], strict=True)
        ]
        found["choice_agreement"] = fmean(same) if same else None
    shared, compared = 0, 0
    for key, exact in reference.answers.items():
        if (answer := run.fastest.get(key)) is not None:
            length = min(len(exact), len(answer.tokens)) if answer.tokens else 0
            shared += count_shared(answer.tokens, exact[:length])
            compared += length
    found["agreement"] = shared / compared if compared else None
    return found


def count_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two answers share from the beginning."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


def compare_rows(rows: Sequence[dict[str, Any]], runs: Sequence[EngineRun], categories: Mapping[str, str]) -> None:
    """Add to each row its ratios to Outrider's plain mode, by category too, and `same_as_plain`."""
    plains = {run.engine: run.fastest for run in runs if run.mode == PLAIN}
    for row, run in zip(rows, runs, strict=True):
        plain = plains.get(run.engine)
        if run.fastest and plain and run.mode != PLAIN:
            row["same_as_plain"] = _share_same(run.fastest, plain)
        if not run.fastest:
            continue
        row["vs_outrider"] = (
            dict.fromkeys(RATIOS, 1.0) if run.name == BASE and run.fastest else compare_pairs(run.pairs, RATIOS)
        )
        for name, its in row["categories"].items():
            own = [pair for pair in run.pairs if categories.get(pair.key) == name]
            its["tok_s_vs_outrider"] = 1.0 if run.name == BASE else compare_pairs(own, ["tok_s"]).get("tok_s")


def list_requests(run: EngineRun) -> list[dict[str, Any]]:
    """Return the times of every answer that was given alone."""
    return [
        {
            "engine": run.name,
            "pass": number,
            "prompt": key,
            "tokens": one.generated,
            "ttft_ms": one.first_s * MS_PER_S,
            "latency_ms": one.last_s * MS_PER_S,
        }
        for number, answers in enumerate(run.alone)
        for key, one in answers.items()
    ]


def list_pairs(run: EngineRun) -> list[dict[str, Any]]:
    """Return every pair, so that ratios can be made of them in other ways."""
    return [
        {"engine": run.name, "of": pair.key, "own": pair.own, "before": pair.before, "after": pair.after}
        for pair in run.pairs
    ]


def _same_again(passes: Sequence[Mapping[str, Answer]]) -> float | None:
    if len(passes) < 2:
        return None
    return fmean(all(one[key].tokens == passes[0][key].tokens for one in passes[1:]) for key in passes[0])


def _share_same(some: Mapping[str, Answer], others: Mapping[str, Answer]) -> float | None:
    shared = [key for key in some if key in others]
    return fmean(some[key].tokens == others[key].tokens for key in shared) if shared else None
