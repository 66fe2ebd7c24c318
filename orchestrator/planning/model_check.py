"""What is known of a model before it is served here: which runtimes load it, its memory, and which drafts fit it.

Files' heads alone are read. A refusal is what the load would say, by the same functions (adapters/model_source.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from adapters import registry
from adapters.contract import Adapter, AdapterError, AdapterUnavailable, ModelRefused
from adapters.decoder.facts import DecoderFacts
from adapters.decoder.hf_config import CONFIG_FILE
from adapters.decoder.spec import DecoderSizes
from adapters.gguf_facts import GgufFacts
from adapters.gguf_header import read_header
from adapters.hf_directory import read_json
from adapters.hf_hub import HUB_PREFIX, find_head, measure_weights, parse_id, pin_revision
from adapters.model_checks import explain_no_drafts
from adapters.model_source import PACKAGE_PREFIX, ModelSource, check_source, is_directory, resolve
from adapters.vocabulary import SIMULATED_PREFIX, vocabulary_at_hand
from orchestrator.config.target import AUTO
from orchestrator.config.without_file import configure_model
from orchestrator.errors import ConfigError
from orchestrator.fitting.precision import sizes_of
from orchestrator.planning.estimates import KV_BYTES
from policies.models.quantization import AS_FILE, weights_bytes
from policies.models.vocabulary import Match, compare, refusal

_SIMULATED: Final = "simulated"
_FORMATS: Final = {"openvino_model.xml": "OpenVINO IR", "genai_config.json": "onnxruntime-genai"}
"""Directories that are told by a file in them; others hold safetensors."""


class DraftSource(NamedTuple):
    """A model that is to draft. Relative paths begin at `base`. `translates`: another vocabulary is no fault."""

    source: str
    base: Path
    translates: bool = False


@dataclass(frozen=True, slots=True)
class RuntimeVerdict:
    """Whether a runtime loads a model. `missing`: why the runtime is not to be used here, "" where it is. `refusal`:
    what the load would say, "" where it would load. `weights_bytes`: of the file's own values in its memory."""

    runtime: str
    devices: tuple[str, ...] = ()
    missing: str = ""
    refusal: str = ""
    weights_bytes: int | None = None

    @property
    def loads(self) -> bool:
        return not self.missing and not self.refusal


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """Whether a draft goes with a target. `match`: of the vocabularies (policies/models/vocabulary.py), "" where it is
    not known. `runtimes`: which here load it as a draft."""

    source: str
    match: str = ""
    refusal: str = ""
    runtimes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """`architecture`, as its files name it, and `format` are "" where that is not known, and the sizes None where no
    runtime reads them. `kv_bytes_per_token`: of a 16-bit KV cache, in which windows are not counted off; `state_bytes`:
    what a text takes beside that. `kv_cache_bytes`: as configured, of all texts. `no_drafts`: why nothing can be
    drafted for it. `cluster_yaml`: the lines of one that serves it, "" where no runtime here does."""

    source: str
    architecture: str
    format: str
    parameters: int | None
    context_tokens: int | None
    kv_bytes_per_token: int | None
    state_bytes: int
    kv_cache_bytes: int
    runtimes: tuple[RuntimeVerdict, ...]
    no_drafts: str
    drafts: tuple[DraftVerdict, ...]
    cluster_yaml: str

    @property
    def loads(self) -> bool:
        return any(verdict.loads for verdict in self.runtimes)

    @property
    def text_tokens(self) -> int | None:
        """The most tokens of one text: those that the model reads, where the KV cache holds as many."""
        if self.context_tokens is None:
            return None
        held = self.kv_cache_bytes // self.kv_bytes_per_token if self.kv_bytes_per_token else self.context_tokens
        return min(self.context_tokens, held)


def check_for_serving(source: str, base: Path, kv_cache_bytes: int, drafts: Sequence[DraftSource] = ()) -> ModelCheck:
    """Check a model as cluster.yaml may name it, and drafts for it. Raises ModelRefused for a source that is none, and
    DownloadFailed where a hub cannot be asked."""
    if source.startswith(HUB_PREFIX):
        pin_revision(parse_id(source))  # else a hub that is away would look like a model without sizes
    verdicts, sizes = _ask_runtimes(source, base)
    architecture, form = _name_files(source, base)
    no_drafts = explain_no_drafts(sizes)
    checked = tuple(_check_draft(source, base, draft, no_drafts) for draft in drafts)
    fitting = [draft for draft, verdict in zip(drafts, checked, strict=True) if not verdict.refusal]
    stored = f" {sizes.stored}" if isinstance(sizes, DecoderFacts) else ""
    return ModelCheck(
        source=source,
        architecture=architecture or (sizes.family if sizes is not None else ""),
        format=f"{form}{stored}",
        parameters=None if sizes is None else sizes.matrix_elements,
        context_tokens=None if sizes is None else sizes.context_length,
        kv_bytes_per_token=None if sizes is None else KV_BYTES * sizes.count_kv_elements(sizes.all_layers),
        state_bytes=sizes.state_bytes if isinstance(sizes, GgufFacts) else 0,
        kv_cache_bytes=kv_cache_bytes,
        runtimes=verdicts,
        no_drafts=no_drafts,
        drafts=checked,
        cluster_yaml=_write_lines(source, base, [verdict.runtime for verdict in verdicts if verdict.loads], fitting),
    )


def _ask_runtimes(
    source: str, base: Path, *, draft: bool = False
) -> tuple[tuple[RuntimeVerdict, ...], DecoderSizes | None]:
    """Return what each runtime says of a model, and its sizes as one reads them; llama.cpp's where it does, which tell
    of states, too."""
    simulated = source.startswith(SIMULATED_PREFIX)
    verdicts: list[RuntimeVerdict] = []
    known: list[DecoderSizes] = []
    for name in registry.names():
        if (name == _SIMULATED) != simulated:
            continue
        verdict, sizes = _ask_runtime(name, source, base, draft=draft)
        verdicts.append(verdict)
        known += [] if sizes is None else [sizes]
    return tuple(verdicts), next((sizes for sizes in known if isinstance(sizes, GgufFacts)), next(iter(known), None))


def _ask_runtime(name: str, source: str, base: Path, *, draft: bool) -> tuple[RuntimeVerdict, DecoderSizes | None]:
    devices: tuple[str, ...] = ()
    missing, why, size, sizes, adapter = "", "", None, None, None
    try:
        adapter = registry.get(name)
        devices = tuple(device.name for device in registry.list_devices(name))
    except AdapterUnavailable as error:
        missing = str(error)
    if not source.startswith(SIMULATED_PREFIX):
        try:
            sizes = check_source(source, base, name, draft=draft)
            size = _measure_weights(source, base, name, adapter)
        except ModelRefused as error:
            why = str(error)
    return RuntimeVerdict(name, devices, missing, why, size), sizes


def _measure_weights(source: str, base: Path, name: str, adapter: Adapter | None) -> int:
    """Return the bytes that a model's weights take on a runtime, whose `adapter` is None where it cannot be had; of a
    hub's model that is not here, those of its files."""
    if source.startswith(HUB_PREFIX):
        return measure_weights(parse_id(source))
    return weights_bytes(sizes_of(resolve(source, base, adapter=name), adapter), AS_FILE)


def _name_files(source: str, base: Path) -> tuple[str, str]:
    """Return the architecture that a model's files name, "" where they name none, and how they hold it."""
    if source.startswith(SIMULATED_PREFIX):
        return _SIMULATED, _SIMULATED
    path, header = find_head(parse_id(source)) if source.startswith(HUB_PREFIX) else (None, None)
    if not is_directory(source, base):
        if header is None:
            file = ModelSource(path, "", source) if path is not None else resolve(source, base)
            header = read_header(file.path, file.whole_bytes)
        return header.text("general.architecture") or "", "GGUF"
    directory = path or base / Path(source).expanduser()
    form = next((form for name, form in _FORMATS.items() if (directory / name).exists()), "safetensors")
    try:
        named = read_json(directory / CONFIG_FILE).get("architectures")
    except ModelRefused:  # the runtimes say so
        named = None
    return str(named[0]) if isinstance(named, list) and named else "", form


def _check_draft(source: str, base: Path, draft: DraftSource, no_drafts: str) -> DraftVerdict:
    """Compare a draft's vocabulary with the target's, and ask which runtimes load it as a draft."""
    if no_drafts:
        return DraftVerdict(draft.source, refusal=no_drafts)
    try:
        ours = vocabulary_at_hand(source, base)
        theirs = vocabulary_at_hand(draft.source, draft.base, ours)
        if ours is None or theirs is None:
            return DraftVerdict(draft.source, refusal="its hub cannot be reached")
        comparison = compare(ours, theirs)
        verdicts, _ = _ask_runtimes(draft.source, draft.base, draft=True)
    except AdapterError as error:
        return DraftVerdict(draft.source, refusal=str(error))
    runtimes = tuple(verdict.runtime for verdict in verdicts if verdict.loads)
    why = "" if runtimes else next((each.refusal or each.missing for each in verdicts), "no runtime is here")
    if comparison.match is Match.DIFFERS and not draft.translates:
        why = refusal(draft.source, comparison)
    return DraftVerdict(draft.source, comparison.match.value, why, runtimes)


def _find_place(source: str, base: Path) -> str:
    """Return a source as a cluster.yaml anywhere on this machine may name it."""
    if source.startswith((HUB_PREFIX, PACKAGE_PREFIX, SIMULATED_PREFIX)):
        return source
    return str((base / Path(source).expanduser()).absolute())


def _write_lines(source: str, base: Path, runtimes: Sequence[str], drafts: Sequence[DraftSource]) -> str:
    """Return the lines that serve a model: by the default runtime where that loads it, else by the first that does,
    with the first of the `drafts` that loads beside it. "" where none does."""
    place = _find_place(source, base)
    for adapter in ["", *runtimes] if runtimes else []:
        for draft in [*(_find_place(draft.source, draft.base) for draft in drafts), ""]:
            try:
                made = configure_model(place, base, {}, adapter=adapter, draft=draft)
            except ConfigError:
                continue
            if made.config.model.adapter in (AUTO, *runtimes):
                return made.text
    return ""


def summarise_check(check: ModelCheck) -> dict[str, Any]:
    """Return a check for programs: its fields, and what follows from them."""
    return {
        **asdict(check),
        "loads": check.loads,
        "text_tokens": check.text_tokens,
        "runtimes": [asdict(verdict) | {"loads": verdict.loads} for verdict in check.runtimes],
        "drafts": [asdict(draft) | {"fits": not draft.refusal} for draft in check.drafts],
    }
