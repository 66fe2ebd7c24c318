"""A GGUF file in two runtimes: OpenVINO reads prompts, llama.cpp decodes.

Of many rows OpenVINO's kernels are the faster ones on a processor, of few rows llama.cpp's (ADR 0139 has the figures).
Weights are held twice, so that a plan takes this where there is memory for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from adapters.artefact import AND
from adapters.contract import (
    LoadOptions,
    ModelRefused,
    NumericalClass,
    Precision,
    Progress,
    Segment,
    Unsupported,
)
from adapters.decoder.limits import refuse_directory
from adapters.llama_cpp.adapter import MEMORY_COSTS, LlamaCppAdapter
from adapters.llama_cpp.contexts import BLOCK_TOKENS
from adapters.llama_cpp.model import LlamaModel
from adapters.names import OPENVINO_LLAMA
from adapters.openvino_llama.model import KeyOrder, TwoRuntimesModel
from adapters.openvino_rt.adapter import CPU_MEMORY, OpenVinoAdapter
from adapters.openvino_rt.model import PagedModel
from adapters.prepared_facts import READER, read_facts, write_facts
from device_profiles.device_names import is_processor
from device_profiles.profile import DRAFT, DeviceProfile, WeightsFormat
from device_profiles.units import ceil_div

_COSTS: Final = replace(
    MEMORY_COSTS,
    fixed_bytes=MEMORY_COSTS.fixed_bytes + CPU_MEMORY.fixed_bytes,
    layer_bytes=CPU_MEMORY.layer_bytes,
    # Of what is prepared a file in 8 bits is two thirds or half, which OpenVINO has twice; the rest llama.cpp has once.
    weights_copies=1.6,
    logits_copies=MEMORY_COSTS.logits_copies + CPU_MEMORY.logits_copies + 1,
    scores_rows=CPU_MEMORY.scores_rows,
)
"""The sum of what the two runtimes have, and the logits of both in one array."""
_PAGES_MORE: Final = 2  # of the reader: one for rows that only fill up, one for those behind a prompt's end
_PROBE: Final = 16  # tokens that both runtimes compute, for their caches to be compared. Not tuned.
_MOST_UNLIKE: Final = 0.5
"""How far a cache of one runtime may be from that of the other, as a share of its length. Roundings make 0.12 in
the last layers of 1.5B (ADR 0139); elements in another order make 1 or more."""


class OpenVinoLlamaAdapter:
    """See the module and the contract."""

    name = OPENVINO_LLAMA

    def __init__(self) -> None:
        self._reader, self._decoder = OpenVinoAdapter(), LlamaCppAdapter()

    def devices(self) -> list[DeviceProfile]:
        """Return the processor. Raises AdapterUnavailable where either runtime is not here."""
        read = {device.name: device for device in self._reader.devices() if is_processor(device.name)}
        return [
            replace(
                device,
                adapter=self.name,
                full_name=f"{device.full_name}, prompts by OpenVINO",
                memory_costs=_COSTS,
            )
            for device in self._decoder.devices()
            if device.name in read
        ]

    def recipe(self, weights: WeightsFormat | None = None) -> str:
        _refuse_weights(weights)
        return f"{self._decoder.recipe(weights)}{AND}{self._reader.recipe()}{AND}one directory, 1"

    def prepare(self, source: Path, target: Path, progress: Progress, weights: WeightsFormat | None = None) -> None:
        """Convert the file for OpenVINO, and link it for llama.cpp, or make a draft's own file for that. Raises what
        their adapters do."""
        _refuse_weights(weights)
        if source.is_dir():
            refuse_directory(self.name, source.name)
        self._reader.prepare(source, target, progress)
        facts = read_facts(target)
        for left in target.glob("*.gguf"):  # by a call that was ended behind it
            left.unlink()
        self._decoder.prepare(source, target, progress, weights)
        write_facts(target, {**facts, **read_facts(target), READER: facts, "is_draft": weights == DRAFT})

    def count_held_bytes(self, converted_bytes: int, file_bytes: int) -> int:
        """Return the weights of both runtimes: what OpenVINO's are converted to, and the file's or a draft's own."""
        return converted_bytes + file_bytes

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        return self._pair(self._decoder.classes(options), options)

    def list_classes(self, prepared: Path, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        return self._pair(self._decoder.list_classes(prepared, options), options)

    def name_other_library(self, prepared: Path, options: LoadOptions) -> str:
        return self._decoder.name_other_library(prepared, options)

    def _pair(
        self, decoding: Sequence[Sequence[NumericalClass]], options: LoadOptions
    ) -> Sequence[Sequence[NumericalClass]]:
        """Return the classes of both, each of one with each of the other."""
        wanted = replace(options, activations=Precision.FP32, kv_cache=Precision.FP16)
        return [
            [replace(row, apart=True, prompts=prompt) for prompt in prompts for row in rows]
            for rows in decoding
            for prompts in self._reader.classes(wanted)
        ]

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> TwoRuntimesModel:
        """Share out the KV cache in halves, but give the reader no more than the longest prompt takes. Whatever fits
        into the decoder's fits into the reader's."""
        chosen = options.numerical_class or self.list_classes(prepared, options)[0][0]
        facts = read_facts(prepared)
        position_bytes = 2 * 2 * facts["layers"] * facts["kv_heads"] * facts["head_dim"]  # keys and values of 16 bits
        more = _PAGES_MORE * BLOCK_TOKENS * position_bytes
        longest = ceil_div(facts["context_length"], BLOCK_TOKENS) * BLOCK_TOKENS * position_bytes
        reader_bytes = min(options.kv_cache_bytes // 2, longest) + more
        reader = self._reader.load(
            prepared,
            replace(options, numerical_class=chosen.prompts, kv_cache_bytes=reader_bytes),
            lambda stage, fraction: progress(stage, fraction / 2),
        )
        try:
            decoder = self._decoder.load(
                prepared,
                replace(
                    options,
                    numerical_class=replace(chosen, apart=False, prompts=None),
                    kv_cache_bytes=options.kv_cache_bytes - reader_bytes,
                ),
                lambda stage, fraction: progress(stage, (1.0 + fraction) / 2),
            )
        except BaseException:
            reader.close()
            raise
        try:
            assert isinstance(decoder, LlamaModel)  # noqa: S101 -- whatever OpenVINO reads from GGUF has a KV cache
            order = KeyOrder(facts["kv_heads"], facts["head_dim"], in_pairs=facts["architecture"] == "llama")
            label = f"{facts['weights']}, prompts {facts[READER]['weights']}"
            model = TwoRuntimesModel(reader, decoder, order, chosen, weights=label)
            _compare_caches(reader, decoder, order, facts)
        except BaseException:
            reader.close()
            decoder.close()
            raise
        return model


def _refuse_weights(weights: WeightsFormat | None) -> None:
    if weights not in (None, DRAFT):
        raise Unsupported(f"weights in {weights}: both runtimes are given the file's own; leave weights at auto")


def _compare_caches(reader: PagedModel, decoder: LlamaModel, order: KeyOrder, facts: Mapping[str, Any]) -> None:
    """Compute a short text in both, and compare what it leaves in their caches: of a draft's copy, whose weights are
    rounded, in the first layer alone. Raises ModelRefused."""
    layers = 1 if facts["is_draft"] else facts["layers"]
    size = reader.spec.vocabulary_size
    tokens = [(7 * place * place + 11 * place + 3) % size for place in range(_PROBE)]
    try:
        for model in (reader, decoder):
            model.forward([Segment(0, 0, tokens, (0, 1))])
        read, computed = reader.export_rows(0, 0, _PROBE), decoder.read_rows(0, _PROBE)
        for place, (left, right) in enumerate(zip(read, computed, strict=True)):
            if place % facts["layers"] >= layers:
                continue
            turned = order.to_pairs(left) if place < len(read) // 2 else left
            mine, its = (rows.view(np.float16).astype(np.float32) for rows in (turned, np.ascontiguousarray(right)))
            unlike = float(np.linalg.norm(mine - its)) / max(float(np.linalg.norm(its)), 1e-9)
            if not unlike <= _MOST_UNLIKE:
                kind, layer = ("keys", "values")[place >= len(read) // 2], place % (len(read) // 2)
                raise ModelRefused(
                    f"{facts['name']}: the {kind} of layer {layer} lie otherwise in OpenVINO than in llama.cpp (they "
                    f"differ by {unlike:.2f} of their length). Choose adapter: llama_cpp or openvino_rt."
                )
    finally:
        reader.release(0)
        decoder.release(0)
