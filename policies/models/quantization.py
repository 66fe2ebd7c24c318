"""In which number formats a model runs on a device: its weights, its activations, its KV cache, and why.

NPUs get int8 weights, GPUs bf16 or fp16, CPUs the format that was measured fastest. Drafts get DRAFT where a runtime
has it for their file, as no output depends on their values, unless the file's own was measured to draft more. Nothing
is chosen that does not fit into memory. Nor are converted weights of a target that keep fewer of the exact values'
greedy choices than `least_agreement`. A CPU takes the file as it is until something was measured to be faster. An 8-bit
KV cache is taken only when asked for, and only where rows may depend on their batch (exactness `kernel`) or the runtime
keeps them invariant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from device_profiles.profile import DRAFT, FAST, DeviceProfile, Exactness, Precision
from device_profiles.units import human_bytes

AS_FILE = "as_file"
AUTO = "auto"
LEAST_AGREEMENT = 0.9
"""The least share of greedy choices that converted weights must have in common with the exact values' to be chosen
unasked. ADR 0020. By ADR 0041 signed 8 bits keep 97 %, whole zeros 75 to 93 %."""
UNMEASURED_COST = "perplexity x 1.15 to 1.2 and 75 to 83 % of the greedy choices on the default model (ADR 0041)"
"""What whole zeros cost where nobody measured them."""

# Exact by each format's blocks, but for INT4: it depends on the vocabulary's share.
BITS_PER_WEIGHT = {
    Precision.FP32: 32.0,
    Precision.BF16: 16.0,
    Precision.FP16: 16.0,
    Precision.FP8: 8.1,  # 8 bits, and a scale a row
    Precision.INT8: 9.0,  # 8 bits, and scale and zero of a group of 32
    Precision.INT4: 5.5,  # 4 bits, scales and zeros; embedding and output layer have 8
}
_DRAFT_SAVES = 0.9
"""Of the file's own bytes, which DRAFT must stay below to be worth a copy of its own. ADR 0125: a step's time goes with
the bytes that it reads."""
_FLOATS = (Precision.BF16, Precision.FP16, Precision.FP32)
_SIXTEEN = (Precision.BF16, Precision.FP16)
_PREFERENCES = {
    "npu": (Precision.INT8, Precision.INT4),
    "gpu": (Precision.BF16, Precision.FP16, Precision.FP8, Precision.INT8, Precision.INT4),
}
_KINDS = {"cuda": "gpu", "rocm": "gpu", "dml": "gpu", "tensorrt": "gpu", "qnn": "npu", "vitisai": "npu"}


class NoPrecision(ValueError):
    """Nothing that was asked for is possible; the message says why, for each, and what is."""


class NoRoom(NoPrecision):
    """Formats that the device has do not fit into its memory. `needed_bytes`: of the smallest of their weights."""

    def __init__(self, message: str, needed_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model as its file has it: `parameters` of its matrices, bytes of the file, and what it calls its format.
    `held_bytes`: what runtimes hold of it, where that is more than the file. `rounds`: whether FAST rounds anything.
    `draft_bytes`: what it takes in DRAFT, 0 where no such copy can be made of it. `converts`: whether its weights can
    be brought to other formats."""

    parameters: int
    file_bytes: int
    stored: str
    held_bytes: int = 0
    rounds: bool = False
    draft_bytes: int = 0
    converts: bool = True


@dataclass(frozen=True, slots=True)
class MeasuredWeights:
    """What weights cost and keep on a device: ms of a decode step, and the share of greedy choices that are those of
    the exact values in float32. `weights` is a precision's name, AS_FILE or FAST. `perplexity_ratio`: to that of the
    exact values, 0 where it is not known."""

    weights: str
    step_ms: float
    agreement: float
    perplexity_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class PrecisionRequest:
    """What the operator asks for. `weights`: AUTO, AS_FILE, FAST, DRAFT or a precision's name; `activations`: AUTO or a
    precision's name; `kv_cache`: AUTO, "16bit" or "8bit". `drafts`: of a draft model."""

    weights: str = AUTO
    activations: str = AUTO
    kv_cache: str = AUTO
    exactness: Exactness = Exactness.BIT
    least_agreement: float = LEAST_AGREEMENT
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class PrecisionChoice:
    """`weights` is a precision's name, AS_FILE or FAST. `activations` and `kv_cache` None: those of the numerical class
    that is measured to be the best."""

    weights: str
    activations: Precision | None
    kv_cache: Precision | None
    reason: str
    rejected: tuple[Rejected, ...]


def list_formats(device: DeviceProfile) -> list[str]:
    """Return the formats of weights that there are for a device: AS_FILE, FAST, DRAFT and precisions' names."""
    own = [AS_FILE, *([FAST] if device.has_fast else []), *([DRAFT] if device.has_draft else [])]
    return [*own, *(precision.value for precision in device.weights)]


def weights_bytes(model: ModelSizes, weights: str) -> int:
    """Return about how many bytes a model's weights take in a format (a precision's name, AS_FILE, FAST or DRAFT)."""
    if weights == DRAFT:
        return model.draft_bytes
    if weights == AS_FILE:
        return max(model.file_bytes, model.held_bytes)
    if weights == FAST:
        return model.file_bytes
    return int(model.parameters * BITS_PER_WEIGHT[Precision(weights)] / 8)


def choose_precision(
    device: DeviceProfile,
    model: ModelSizes,
    measured: Sequence[MeasuredWeights] = (),
    wanted: PrecisionRequest = PrecisionRequest(),
    *,
    free_bytes: int | None = None,
    other_bytes: int = 0,
) -> PrecisionChoice:
    """Choose number formats. `free_bytes` is the device's free memory (None: not known), `other_bytes` what KV cache
    and workspace take of it.

    Raises NoPrecision when a requested format cannot be met, and NoRoom when nothing fits; the message says why.
    """
    activations, about_activations = _activations(device, wanted)
    kv_cache, about_kv = _kv_cache(device, wanted)
    room = None if free_bytes is None else free_bytes - other_bytes
    weights, why, rejected = _weights(device, model, measured, wanted, room)
    return PrecisionChoice(
        weights=weights,
        activations=activations,
        kv_cache=kv_cache,
        reason="; ".join(filter(None, (f"weights {weights}: {why}", about_activations, about_kv))),
        rejected=(*rejected, *_reject_kv_cache(device, kv_cache, wanted)),
    )


def _weights(
    device: DeviceProfile,
    model: ModelSizes,
    measured: Sequence[MeasuredWeights],
    wanted: PrecisionRequest,
    room: int | None,
) -> tuple[str, str, tuple[Rejected, ...]]:
    figures = {figure.weights: figure for figure in measured}
    if wanted.weights == AUTO and wanted.drafts and (choice := _choose_draft(device, model, figures, room)) is not None:
        return choice
    if wanted.weights != AUTO:
        if problem := _find_missing(device, wanted.weights) or _find_no_draft(model, wanted):
            raise NoPrecision(f"weights {wanted.weights}: {problem}")
        if _explain_size(model, wanted.weights, room):
            raise _build_no_room(model, [wanted.weights], room)
        return wanted.weights, _explain_request(model, wanted.weights, figures.get(FAST)), ()
    rejected: list[Rejected] = []
    left: list[str] = []
    too_large: list[str] = []
    for weights in _candidates(device):
        problem = _find_missing(device, weights) or _too_far(figures.get(weights), weights, wanted)
        if not problem and (problem := _explain_size(model, weights, room)):
            too_large.append(weights)
        if problem:
            rejected.append(Rejected(weights, problem))
        else:
            left.append(weights)
    if not left and too_large:
        raise _build_no_room(model, too_large, room)
    if not left:
        raise NoPrecision("; ".join(f"weights {rejection.what}: {rejection.why}" for rejection in rejected))
    if _kind(device) in _PREFERENCES:
        chosen, why = left[0], _why_by_kind(device, left[0], model)
        rejected += [Rejected(weights, f"{chosen} comes first on a {_kind(device)}") for weights in left[1:]]
        return chosen, why, tuple(rejected)
    return _fastest(left, figures, model, rejected)


def _choose_draft(
    device: DeviceProfile, model: ModelSizes, figures: dict[str, MeasuredWeights], room: int | None
) -> tuple[str, str, tuple[Rejected, ...]] | None:
    """Return DRAFT with the reason, None where a draft is better off with what any model gets. Where both were
    measured, what decides is how many tokens that the exact values choose a millisecond of drafting gives."""
    own_bytes = weights_bytes(model, AS_FILE)
    if not device.has_draft or not 0 < model.draft_bytes <= _DRAFT_SAVES * own_bytes:
        return None
    if _explain_size(model, DRAFT, room):
        return None
    small, own = figures.get(DRAFT), figures.get(AS_FILE)
    if small is None or own is None:
        sizes = f"{human_bytes(model.draft_bytes)} and not {human_bytes(own_bytes)}"
        return DRAFT, f"no output depends on a draft's values, and {sizes} are read sooner", ()
    rates = {figure.weights: figure.agreement / figure.step_ms for figure in (small, own)}
    if rates[DRAFT] < rates[AS_FILE]:
        return None
    kept = f"{small.step_ms:.2f} ms a step and {small.agreement:.1%} of the greedy choices"
    other = f"{own.step_ms:.2f} ms a step and {own.agreement:.1%}"
    return DRAFT, f"measured to draft more in its time, {kept}", (Rejected(AS_FILE, other),)


def _find_no_draft(model: ModelSizes, wanted: PrecisionRequest) -> str:
    """Return why there is no copy in DRAFT; "" where another format is asked for, or there is one."""
    if wanted.weights != DRAFT or model.draft_bytes:
        return ""
    return "it is made of GGUF files alone; leave weights at auto"


def _explain_request(model: ModelSizes, weights: str, measured: MeasuredWeights | None) -> str:
    """Return why a request is met; where it is FAST, with its cost."""
    if weights != FAST:
        return "asked for"
    if not model.rounds:
        return f"asked for, and the same as {AS_FILE}: {model.stored} has no offsets to round"
    cost = UNMEASURED_COST
    if measured is not None and measured.perplexity_ratio:
        kept = f"{measured.agreement:.1%} of the greedy choices"
        cost = f"perplexity x {measured.perplexity_ratio:.3f} and {kept}, measured here"
    return f"asked for; offsets rounded to whole steps give {cost}"


def _fastest(
    left: list[str], figures: dict[str, MeasuredWeights], model: ModelSizes, rejected: list[Rejected]
) -> tuple[str, str, tuple[Rejected, ...]]:
    known = [figures[weights] for weights in left if weights in figures]
    unknown = [weights for weights in left if weights not in figures]
    rejected += [Rejected(weights, "not measured on this device") for weights in unknown if weights != AS_FILE]
    if AS_FILE in unknown or not known:
        chosen = AS_FILE if AS_FILE in left else left[0]
        why = f"the file's own ({model.stored}), not compared with other formats" if chosen == AS_FILE else "what fits"
        rejected += [Rejected(figure.weights, f"the file's own {AS_FILE} is not measured") for figure in known]
        rejected[:] = [rejection for rejection in rejected if rejection.what != chosen]
        return chosen, why, tuple(rejected)
    best = min(known, key=lambda figure: (figure.step_ms, left.index(figure.weights)))
    for figure in known:
        if figure is not best:
            rejected.append(Rejected(figure.weights, f"{figure.step_ms:.2f} ms a step, not {best.step_ms:.2f}"))
    return best.weights, f"measured fastest, {best.step_ms:.2f} ms a step", tuple(rejected)


def _candidates(device: DeviceProfile) -> Iterator[str]:
    """Yield formats in order of preference; AS_FILE leads where speed decides and comes last where the kind does."""
    preferred = _PREFERENCES.get(_kind(device))
    if preferred is None:
        yield AS_FILE
        yield from (precision.value for precision in device.weights)
        return
    offered = [precision for precision in preferred if precision in device.weights]
    if offered[:2] == [*_SIXTEEN] and Precision.BF16 not in device.precisions and Precision.FP16 in device.precisions:
        offered[:2] = reversed(_SIXTEEN)  # of the two formats of 16 bits, the one that the device computes in
    # Where none has 16 bits, the file's own values are held in as many, and nothing is lost while they fit.
    whole = _kind(device) == "gpu" and not set(_SIXTEEN) & set(offered)
    yield from (AS_FILE, *map(str, offered)) if whole else (*map(str, offered), AS_FILE)


def _find_missing(device: DeviceProfile, weights: str) -> str:
    offered = list_formats(device)
    if weights not in offered:
        return f"{device.adapter} has none for {device.name}; there are {', '.join(offered)}"
    return ""


def _explain_size(model: ModelSizes, weights: str, room: int | None) -> str:
    """Return why weights do not fit; "" where they do, or nobody knows what is free."""
    needed = weights_bytes(model, weights)
    if room is not None and needed > room:
        return f"needs {human_bytes(needed)}, and beside KV cache and workspace {human_bytes(max(room, 0))} are free"
    return ""


def _build_no_room(model: ModelSizes, too_large: Sequence[str], room: int | None) -> NoRoom:
    sizes = {weights: weights_bytes(model, weights) for weights in too_large}
    needs = "; ".join(f"weights {weights}: needs {human_bytes(size)}" for weights, size in sizes.items())
    left = human_bytes(room) if room is not None and room > 0 else "nothing"
    return NoRoom(f"{needs}; beside the KV cache {left} is free", min(sizes.values()))


def _too_far(figures: MeasuredWeights | None, weights: str, wanted: PrecisionRequest) -> str:
    if weights == AS_FILE or figures is None or figures.agreement >= wanted.least_agreement:
        return ""
    return f"keeps {figures.agreement:.1%} of the greedy choices, less than {wanted.least_agreement:.0%}"


def _why_by_kind(device: DeviceProfile, weights: str, model: ModelSizes) -> str:
    kind = _kind(device)
    first = next(_candidates(device))
    if weights == first == AS_FILE:
        return f"the file's own ({model.stored}), which the {kind} loses nothing of"
    if weights == AS_FILE:
        return f"the file's own ({model.stored}), nothing better fits the {kind}"
    return f"what {kind.upper()}s compute best" if weights == first else f"the best for the {kind} that fits"


def list_unmet(device: DeviceProfile, wanted: PrecisionRequest) -> list[tuple[str, str]]:
    """Return the keys of number formats that a device does not have, and why, the way out included; but for weights."""
    problems = []
    for key, choose in (("activations", _activations), ("kv_cache_precision", _kv_cache)):
        try:
            choose(device, wanted)
        except NoPrecision as refusal:
            problems.append((key, str(refusal)))
    return problems


def _activations(device: DeviceProfile, wanted: PrecisionRequest) -> tuple[Precision | None, str]:
    if wanted.activations == AUTO:
        return None, ""
    native = [precision for precision in _FLOATS if precision in device.precisions] or [Precision.FP32]
    precision = Precision(wanted.activations)
    if precision not in native and precision is not Precision.FP32:
        raise NoPrecision(
            f"activations {precision}: {device.adapter} computes in {', '.join(native)} on {device.name}; "
            "ask for one of these, or leave them at auto"
        )
    return precision, f"activations {precision}: asked for"


def _kv_cache(device: DeviceProfile, wanted: PrecisionRequest) -> tuple[Precision | None, str]:
    if wanted.kv_cache == "8bit":
        problem = _no_8_bits(device, wanted)
        if problem:
            raise NoPrecision(f"kv_cache_precision 8bit: {problem}")
        return Precision.INT8, f"KV cache {Precision.INT8}: asked for"
    if wanted.kv_cache == "16bit" and device.kv_cache and not set(_SIXTEEN) & set(device.kv_cache):
        raise NoPrecision(
            f"kv_cache_precision 16bit: {device.adapter}'s on {device.name} is {', '.join(device.kv_cache)}; "
            "leave it at auto"
        )
    return None, ""


def _reject_kv_cache(device: DeviceProfile, chosen: Precision | None, wanted: PrecisionRequest) -> list[Rejected]:
    if chosen is Precision.INT8 or Precision.INT8 not in device.kv_cache:
        return []
    return [Rejected("KV cache int8", _no_8_bits(device, wanted) or "costs quality, and was not asked for")]


def _no_8_bits(device: DeviceProfile, wanted: PrecisionRequest) -> str:
    if Precision.INT8 not in device.kv_cache:
        return f"{device.adapter} has none on {device.name}; leave it at auto"
    if wanted.exactness is Exactness.BIT and Precision.INT8 not in device.exact_kv_cache:
        return "with 8 bits output would depend on the batch, and exactness is bit; set exactness: kernel"
    return ""


def _kind(device: DeviceProfile) -> str:
    return _KINDS.get(device.kind, device.kind)
