"""What decides the bits of a row's logits, and what was found of it on one device.

Two rows of one numerical class have the same bits whatever else is in their forward; two devices whose classes have
one fingerprint are interchangeable to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from device_profiles.profile import Precision

MIXED_ROWS = ((1, 0.3), (2, 0.2), (4, 0.25), (8, 0.15), (16, 0.1))
"""Rows of a decoding forward, and their share in `mixed_ms`: depths as a decode loop chooses them."""
_FORWARDS = 60
"""Decoding forwards beside one prefill in `mixed_ms`. ADR 0040."""
FIXED_WIDTH = 16
"""Rows of every forward in the last class that a runtime is tried in (ADR 0040): room for a draft of 12. Plain steps
pay for all of them (ADR 0015: 45 ms and not 29 for one row, bf16 on a processor)."""


@dataclass(frozen=True, slots=True)
class NumericalClass:
    """How rows are computed.

    `quantization_group`: activations are quantised to 8 bits in groups of so many in front of each product, 0: not.
    `segment_rows`, `forward_rows` and `output_rows`: a segment, a forward and its output layer have at least so many
    rows. `most_rows`: a forward has at most so many, 0: any number. `apart`: rows behind a prompt use the
    single-row kernel (adapters.contract.Segment.apart). `fixed_width`: every forward, and its output layer, has
    exactly so many rows, 0: as many as come. `prompts`: how rows of prompts are computed, where another runtime does;
    None: as the others.
    """

    activations: Precision
    kv_cache: Precision
    quantization_group: int = 0
    segment_rows: int = 1
    forward_rows: int = 1
    apart: bool = False
    output_rows: int = 1
    most_rows: int = 0
    fixed_width: int = 0
    prompts: NumericalClass | None = None

    def __str__(self) -> str:
        """Return it as people read it, as in "fp32 in groups of 32, KV cache fp16, segments of 2 rows or more"."""
        words = [self.activations.value + (f" in groups of {self.quantization_group}" * (self.quantization_group > 0))]
        words.append(f"KV cache {self.kv_cache}")
        if self.fixed_width:
            words.append(f"forwards of {self.fixed_width} rows")
        elif self.segment_rows > 1:
            words.append(f"segments of {self.segment_rows} rows or more")
        if self.apart and self.prompts is None:
            words.append("decoding rows apart")
        if self.output_rows > 1:
            words.append(f"outputs of {self.output_rows} rows or more")
        if self.most_rows:
            words.append(f"forwards of at most {self.most_rows} rows")
        if self.prompts is not None:
            words.append(f"prompts in {self.prompts}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class ClassFinding:
    """What came of trying one class with one model.

    `why` it was not taken, or what was found. `fingerprint`: of the bits of a fixed probe, "" where it did not run.
    `decode_ms`: (rows, milliseconds) of a forward of one sequence; `prefill_ms`: of a prompt of `prefill_tokens`.
    `rounds_ms`: `mixed_ms` of each round of timing, of which each had every class in turn.
    `agreement`: share of the greedy choices of a float32 reference over the file's values, None where there is none.
    `load_s`: loading the model. `tried`: False where another one had passed by then, and trying took its time.
    """

    numerical_class: NumericalClass
    passed: bool
    why: str
    fingerprint: str = ""
    decode_ms: tuple[tuple[int, float], ...] = ()
    prefill_ms: float = 0.0
    prefill_tokens: int = 0
    agreement: float | None = None
    load_s: float = 0.0
    rounds_ms: tuple[float, ...] = ()
    tried: bool = True

    @property
    def mixed_ms(self) -> float:
        """What a request takes about: 60 decoding forwards of mixed rows and one prefill; 0 where not measured."""
        return mix_ms(dict(self.decode_ms), self.prefill_ms) if self.decode_ms else 0.0

    def compare_cost(self, other: ClassFinding) -> float:
        """Return what it costs beside another, at the median of the rounds: what else the machine did in a round slowed
        both down. Above 0, and infinite beside what costs nothing."""
        pairs = list(zip(self.rounds_ms, other.rounds_ms, strict=False)) or [(self.mixed_ms, other.mixed_ms)]
        return median(mine / its if its else float("inf") for mine, its in pairs)


def mix_ms(decode_ms: Mapping[int, float], prefill_ms: float) -> float:
    """Return what a request takes about, by the milliseconds of decoding forwards by rows, and of a prompt."""
    shares = [(decode_ms[rows], share) for rows, share in MIXED_ROWS if rows in decode_ms]
    mean_ms = sum(ms * share for ms, share in shares) / sum(share for _, share in shares)
    return _FORWARDS * mean_ms + prefill_ms


@dataclass(frozen=True, slots=True)
class MeasuredClasses:
    """The classes that were tried with a model on a device, in this order. `chosen`: the place of the one that was
    taken, -1 where none passed. `fingerprint` is of hardware and runtime, `asked` the operator's options,
    `weights` the recipe of the prepared weights."""

    fingerprint: str
    adapter: str
    device: str
    model: str
    model_digest: str
    weights: str
    asked: str
    threads: int
    findings: tuple[ClassFinding, ...]
    chosen: int
    measured_at: str = ""
    took_s: float = 0.0

    @property
    def finding(self) -> ClassFinding | None:
        return self.findings[self.chosen] if self.chosen >= 0 else None

    def prefer(self, name: str) -> MeasuredClasses:
        """Return them with the class of this name taken, where it passed."""
        for place, finding in enumerate(self.findings):
            if finding.passed and str(finding.numerical_class) == name:
                return replace(self, chosen=place)
        return self

    @property
    def rejected(self) -> tuple[ClassFinding, ...]:
        return tuple(finding for place, finding in enumerate(self.findings) if place != self.chosen)


def choose_class(findings: tuple[ClassFinding, ...], margin: float) -> int:
    """Return the place of the class to take: the first that passed, unless a later one costs less than `margin` times
    as much. Earlier ones are those that more devices share. -1 where none passed."""
    chosen = -1
    for place, finding in enumerate(findings):
        if finding.passed and (chosen < 0 or finding.compare_cost(findings[chosen]) < margin):
            chosen = place
    return chosen
