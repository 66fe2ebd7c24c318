"""llama.cpp: a GGUF file where it lies, read into memory as the library's kernels want it. Nothing is converted.

Weights that are read while a model is still being prepared: its file is digested and its tokenizer made meanwhile.

Whoever loads the model takes them where the file is still the one that was read, by all that changes with a write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil

from adapters.content_digest import full_identity
from adapters.contract import (
    ALL_LAYERS,
    AdapterError,
    LoadOptions,
    LoraFile,
    ModelRefused,
    NumericalClass,
    OutOfMemory,
    Precision,
    Progress,
    Unsupported,
)
from adapters.decoder.draft_outputs import TABLE, choose_outputs, describe_copy
from adapters.decoder.facts import Memory
from adapters.decoder.gguf_blocks import can_read
from adapters.decoder.gguf_keys import read_count
from adapters.decoder.limits import refuse_directory
from adapters.decoder.source import fingerprint_of
from adapters.device_memory import read_host_memory
from adapters.failures import classify_failure
from adapters.gguf_facts import read_facts as read_gguf_facts
from adapters.gguf_header import GgufHeader
from adapters.gguf_splits import find_files, list_names, read_model_header
from adapters.hardware import cores
from adapters.llama_cpp.contexts import GROWTH, MOST_ROWS, STEP_CELLS, OpenModel
from adapters.llama_cpp.draft_file import EmbeddingTable, write_draft_file, write_embedding
from adapters.llama_cpp.fork_faults import NO_LORAS, find_fault
from adapters.llama_cpp.library import choose_library, choose_library_for
from adapters.llama_cpp.model import LlamaModel
from adapters.llama_cpp.native import CPU, GgmlDevice, NativeLibrary
from adapters.llama_cpp.recurrent import RecurrentModel
from adapters.prepared_facts import Facts, model_spec, read_facts, write_facts
from device_profiles.device_names import is_processor
from device_profiles.memory import LayerCosts, MemoryCosts
from device_profiles.profile import DRAFT, DeviceProfile, WeightsFormat
from device_profiles.units import MIB

_TELL_EVERY_S = 0.25  # until progress is told again. Not tuned.
_FIRST_FILE: Final = "model-00001-of-{count:05d}.gguf"
"""The library finds the other files of a split model by the name of the first."""
_REASON: Final = "error loading model:"
CONTEXT_BYTES: Final = 26 * MIB
"""Of a context of ik_llama.cpp beside its KV cache and logits: 26 MiB for the default model, 28 for one of 1.5B."""
MEMORY_COSTS: Final = MemoryCosts(
    fixed_bytes=60 * MIB,
    weights_copies=1,
    embedding_copies=1,
    logits_copies=1,
    mlp_floats=2,
    hidden_floats=8,
    slot_logits_rows=2 * MOST_ROWS,
    slot_bytes=CONTEXT_BYTES,
)


LAYER_COSTS: Final = LayerCosts(
    host_bytes=60 * MIB,
    device_bytes=0,
    slot_rows=MOST_ROWS,
    slot_positions=STEP_CELLS,
    kv_copies=1 + 1 / GROWTH,
    mlp_floats=MEMORY_COSTS.mlp_floats,
    hidden_floats=MEMORY_COSTS.hidden_floats,
)
"""By what the library says of its buffers. Its driver's own part is what a plan leaves free."""
_FED_ROWS: Final = ("llama", "qwen2", "qwen3")
"""Architectures whose layers are given the embedding's rows as they are. Others scale them where tokens are given, and
may not where rows are."""
_KINDS: Final = {"discrete": "", "integrated": ", integrated", "software": ", in software"}


@dataclass(frozen=True, slots=True)
class Weights:
    """A file as it is now, and how it is read. `identity`: what changes with any write, () where it is not there."""

    library: NativeLibrary
    file: Path = field(compare=False)  # a link to it is as good
    place: Path
    device: str
    layers: int
    repack: bool
    identity: tuple[int, ...]

    @classmethod
    def of(cls, library: NativeLibrary, file: Path, device: str, layers: int, *, repack: bool) -> Weights:
        """Return those of a file, or of what a link leads to."""
        identity: tuple[int, ...] = ()
        with suppress(OSError):
            identity = tuple(full_identity(file))
        return cls(library, file, file.resolve(), device, layers, repack, identity)

    @property
    def are_there(self) -> bool:
        now = Weights.of(self.library, self.file, self.device, self.layers, repack=self.repack)
        return bool(self.identity) and now == self

    def read(self, tell: Callable[[float], bool]) -> int:
        return self.library.load_model(self.file, self.device, self.layers, tell, repack=self.repack)


class ReadAhead:
    """Weights that a thread of its own reads onto their device."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._fraction, self._is_wanted, self._began_bytes = 0.0, True, psutil.Process().memory_info().rss
        thread = ThreadPoolExecutor(1, "read weights ahead")
        self._model: Future[int] = thread.submit(weights.read, self._go_on)
        thread.shutdown(wait=False)

    def _go_on(self, fraction: float) -> bool:
        self._fraction = fraction
        return self._is_wanted

    @property
    def held_bytes(self) -> int:
        """How much of this process's memory has what was read and nobody took: on other devices none. What is packed
        anew is there twice meanwhile, so that no share of the file tells it."""
        is_here = self._is_wanted and is_processor(self._weights.device) and bool(self._weights.identity)
        return max(0, psutil.Process().memory_info().rss - self._began_bytes) if is_here else 0

    def take(self, wanted: Weights, progress: Progress) -> int | None:
        """Return what reading the same weights gave, once they are read; None where others are wanted, or the file was
        changed since. Raises what `progress` raises."""
        while wanted == self._weights and wanted.are_there:
            progress("load", self._fraction)
            if wait([self._model], _TELL_EVERY_S).done and wanted.are_there:
                self._is_wanted = False
                return self._model.result()
        return None

    def close(self) -> None:
        """Give back what nobody took. Idempotent."""
        if self._is_wanted:
            self._is_wanted = False
            if model := self._model.result():
                self._weights.library.close_model(model)


class LlamaCppAdapter:
    """See the module and the contract. It prepares a link: weights are the file's own."""

    name = "llama_cpp"
    prepared_bytes = 1 * MIB
    """What a prepared model takes in the store, however large its file is."""

    def __init__(self, find_library: Callable[[], NativeLibrary] = choose_library) -> None:
        """`find_library` raises AdapterUnavailable where there is none."""
        self._find_library = find_library
        self._ahead: ReadAhead | None = None

    def devices(self) -> list[DeviceProfile]:
        """Return the processor, and what else the library was built for. Raises AdapterUnavailable."""
        library = self._find_library()
        processor = DeviceProfile(
            adapter=self.name,
            name=CPU,
            kind="cpu",
            full_name=_name_processor(library),
            memory_bytes=read_host_memory().total_bytes,
            in_host_memory=True,
            precisions=(Precision.FP32,),
            kv_cache=(Precision.FP16,),
            exact_kv_cache=(Precision.FP16,),
            memory_costs=MEMORY_COSTS,
            has_fast=False,
            has_draft=True,
        )
        return [processor, *(self._describe(device, library.name) for device in library.list_devices())]

    def _describe(self, device: GgmlDevice, library: str) -> DeviceProfile:
        return DeviceProfile(
            adapter=self.name,
            name=device.name,
            kind="gpu",
            full_name=f"{device.full_name}{_KINDS[device.kind]}, by {library}",
            memory_bytes=device.total_bytes,
            free_bytes=device.free_bytes,
            in_host_memory=device.kind != "discrete",
            layer_costs=LAYER_COSTS,
            precisions=(Precision.FP32,),
            kv_cache=(Precision.FP16,),
            exact_kv_cache=(Precision.FP16,),
            has_fast=False,
            has_draft=True,
        )

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        """Of models with a KV cache alone."""
        _check_formats(options)
        return self._find_library().list_classes(options.device, options.exactness)

    def list_classes(self, prepared: Path, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        _check_formats(options)
        facts = read_facts(prepared)
        library = self._choose_library(facts, options)
        if facts["rewinds"]:
            return library.list_classes(options.device, options.exactness)
        return library.list_unpadded_classes(options.exactness, attends=facts["attends"])

    def name_other_library(self, prepared: Path, options: LoadOptions) -> str:
        library = self._choose_library(read_facts(prepared), options)
        return library.version if library.has_faults is not self._find_library().has_faults else ""

    def _choose_library(self, facts: Mapping[str, Any], options: LoadOptions) -> NativeLibrary:
        fault = facts["fault"] or (NO_LORAS if options.loras else "")
        return choose_library_for(self._find_library(), facts["name"], fault)

    def recipe(self, weights: WeightsFormat | None = None) -> str:
        """Name the format of the facts, faults among them. What is linked are the files, whatever the library is."""
        _refuse_weights(weights)
        return "the files themselves, 4" if weights is None else f"a draft's own file, 1; gguf {version('gguf')}"

    def prepare(self, source: Path, target: Path, progress: Progress, weights: WeightsFormat | None = None) -> None:
        """Write down a model's facts, and where its files are; or a draft's own file. Raises ModelRefused, Unsupported
        for other weights."""
        _refuse_weights(weights)
        if source.is_dir():
            refuse_directory(self.name, source.name)
        header = read_model_header(source)
        if weights == DRAFT:
            _prepare_draft(header, target, progress)
            return
        write_facts(target, _find_facts(header))
        files = find_files(header)
        for name, file in zip(list_names(_FIRST_FILE.format(count=len(files))), files, strict=True):
            (target / name).symlink_to(file.resolve())
        progress(f"look at {source.name}", 1.0)

    def read_ahead(self, file: Path, device: str) -> None:
        self.drop_ahead()
        if not is_processor(device):  # how many layers a GPU is to have is not known yet
            return
        with suppress(OSError, AdapterError):  # whoever loads it says what is wrong
            header = read_model_header(file)
            library = choose_library_for(self._find_library(), file.name, find_fault(header))
            repack = read_gguf_facts(header).cuts_anywhere
            self._ahead = ReadAhead(Weights.of(library, file, device, ALL_LAYERS, repack=repack))

    @property
    def ahead_bytes(self) -> int:
        return self._ahead.held_bytes if self._ahead is not None else 0

    def drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> LlamaModel | RecurrentModel:
        facts = read_facts(prepared)
        library = self._choose_library(facts, options)
        library.check_device(options.device)
        chosen = options.numerical_class or self.list_classes(prepared, options)[0][0]
        progress("load", 0.0)
        layers = _count_from_end(options.device_layers, facts["draft_layers"])
        file = _find_first_file(prepared)
        model = self._read(Weights.of(library, file, options.device, layers, repack=facts["rewinds"]), progress)
        if not model:
            raise _explain(library, facts["name"])
        try:
            loaded = self._open(library, model, prepared, options, chosen)
        except BaseException:
            library.close_model(model)
            raise
        progress("load", 1.0)
        return loaded

    def _read(self, wanted: Weights, progress: Progress) -> int:
        """Return the model that a file's weights make, those that were read ahead where they are these; 0 where it is
        not loaded."""

        def tell(fraction: float) -> bool:
            progress("load", fraction)
            return True

        if self._ahead is not None and (model := self._ahead.take(wanted, progress)) is not None:
            return model
        self.drop_ahead()
        return wanted.read(tell)

    def _open(
        self, library: NativeLibrary, model: int, prepared: Path, options: LoadOptions, chosen: NumericalClass
    ) -> LlamaModel | RecurrentModel:
        facts = read_facts(prepared)
        if kind := library.find_other_kind(model):
            raise ModelRefused(f"{facts['name']}: it {kind}, and this adapter serves decoders alone")
        layers, vocabulary = library.describe_model(model)
        spec = model_spec({**facts, "layers": layers}, 0)
        if vocabulary != spec.outputs:
            raise ModelRefused(
                f"{facts['name']}: its head names {spec.outputs} tokens, and {library.name} finds "
                f"{vocabulary}. Convert the model again."
            )
        if library.is_recurrent(model) == facts["rewinds"]:
            announced, actual = ("a KV cache alone", "a recurrent state")[:: 1 if facts["rewinds"] else -1]
            raise ModelRefused(f"{facts['name']}: its head tells of {announced}, and {library.name} finds {actual}")
        kind_of_model = LlamaModel if facts["rewinds"] else RecurrentModel
        embedding = EmbeddingTable(prepared, spec.output_ids, **facts["embedding"]) if spec.output_ids else None
        loras = {lora.name: _read_lora(library, model, lora) for lora in options.loras}
        opened = OpenModel(library, model, options.device, options.threads or cores(), embedding, loras)
        loaded = kind_of_model(opened, spec, options, chosen, weights=str(facts["weights"]))
        if library is not self._find_library():
            loaded.capabilities = replace(loaded.capabilities, device_name=_name_processor(library))
        return loaded


def _read_lora(library: NativeLibrary, model: int, lora: LoraFile) -> int:
    handle = library.load_lora(model, Path(lora.path))
    if not handle:
        reason = library.last_words or "it gives no reason"
        raise ModelRefused(f"{lora.name}: {library.name} does not read {lora.path}: {reason}")
    return handle


def _name_processor(library: NativeLibrary) -> str:
    return f"processor, by {library.name}"


def _check_formats(options: LoadOptions) -> None:
    if options.activations not in (None, Precision.FP32):
        raise Unsupported(f"activations {options.activations}: on llama.cpp they are fp32; leave them at auto")
    if options.kv_cache not in (None, Precision.FP16):
        raise Unsupported(f"a KV cache in {options.kv_cache}: llama.cpp's is fp16 here; leave it at auto")


def _refuse_weights(weights: WeightsFormat | None) -> None:
    if weights not in (None, DRAFT):
        raise Unsupported(
            f"weights in {weights}: llama.cpp runs a file's own; leave weights at auto, or take a file that has them"
        )


def _count_from_end(device_layers: int, draft_layers: int) -> int:
    """Return how many layers the library is to put on a device: it counts those that only draft, too, which stand
    between the last and the output head."""
    return device_layers + draft_layers if device_layers > 0 else device_layers


def _find_first_file(prepared: Path) -> Path:
    (file,) = prepared.glob(_FIRST_FILE.replace("{count:05d}", "*"))
    return file


def _prepare_draft(header: GgufHeader, target: Path, progress: Progress) -> None:
    """Write a draft's own file, the embedding beside it where its output layer has fewer tokens, and the facts."""
    facts = _find_facts(header)
    table = next(tensor for tensor in header.tensors if tensor.name == TABLE)
    is_fed = facts["architecture"] in _FED_ROWS and can_read(table.kind, 2)
    outputs = choose_outputs(header) if is_fed else ()
    write_draft_file(header, target / _FIRST_FILE.format(count=1), outputs, progress)
    facts["weights"] = describe_copy(str(facts["weights"]), len(outputs), read_gguf_facts(header).vocabulary_size)
    if outputs:
        facts |= {"output_ids": list(outputs), "embedding": write_embedding(header, target)}
    write_facts(target, facts)


def _find_facts(header: GgufHeader) -> Facts:
    facts = read_gguf_facts(header)
    return {
        "name": header.path.name,
        "architecture": facts.family,
        "layers": facts.layers,
        "draft_layers": read_count(header, f"{facts.family}.nextn_predict_layers", 0, least=0),
        "context_length": facts.context_length,
        "vocabulary_size": facts.vocabulary_size,
        "vocabulary_fingerprint": fingerprint_of(header.path, facts.vocabulary_size),
        "weights": facts.stored,
        "fault": find_fault(header),
        "rewinds": facts.cuts_anywhere,
        "attends": facts.memory is not Memory.RECURRENT,
    }


def _explain(library: NativeLibrary, name: str) -> Exception:
    lines = library.last_words.splitlines() or ["it gives no reason"]
    failure = classify_failure(RuntimeError("\n".join(lines)), library.name)
    if isinstance(failure, OutOfMemory):
        return failure
    reason = next((line.partition(_REASON)[2] for line in lines if _REASON in line), lines[-1])
    return ModelRefused(f"{name}: {library.name} does not load it: {reason.strip()}")
