"""The torch runtime: transformers' model classes on the CPU and on CUDA devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.contract import (
    AdapterUnavailable,
    Exactness,
    LayerRange,
    LoadOptions,
    NumericalClass,
    Precision,
    Progress,
    Unsupported,
    check_layers,
)
from adapters.device_memory import read_host_memory
from adapters.hardware import cores
from adapters.hf_directory import is_for_transformers
from adapters.prepared_facts import facts_of, model_spec, read_facts, write_facts
from adapters.source_meter import SourceMeter, say_bytes
from adapters.torch_device.failures import quieten
from adapters.torch_device.rank_link import RankPlace
from device_profiles.device_names import is_processor, list_rank_devices
from device_profiles.measured import DeviceRates
from device_profiles.memory import MemoryCosts
from device_profiles.numerical_class import FIXED_WIDTH
from device_profiles.profile import FAST, DeviceProfile, WeightsFormat, find_listed_device
from device_profiles.units import MIB

if TYPE_CHECKING:
    from adapters.torch_device.model import TorchModel

INSTALL = "outrider extras install torch"
_QUANTISED = (Precision.INT8, Precision.INT4)
# Bytes of a number in each format.
_ELEMENT_BYTES = {Precision.FP32: 4.0, Precision.BF16: 2.0, Precision.FP16: 2.0}
# Products hold weights packed, and the table of embeddings as it was read: one that is the head, too, is there twice.
# ADR 0148.
_CPU_MEMORY = MemoryCosts(
    fixed_bytes=170 * MIB,
    weights_copies=1,
    embedding_copies=1,
    tied_copies=1,
    logits_copies=1.5,
    mlp_floats=3,
    hidden_floats=8,
    rank_bytes=400 * MIB,
    kv_at_once=True,
    width_bytes=2_400_000,
)
_SPINS = "1000"
"""How often a thread of torch looks for work before it sleeps.

A thread that spins for long takes the core from the one it waits for, as soon as anything else runs here
(docs/adr/0015-torch.md). What the environment says goes first.
"""


def import_torch() -> Any:
    """Import torch as this adapter uses it. Raises AdapterUnavailable."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read once, when torch loads its OpenMP
    try:
        import torch

        quieten()
        import transformers  # noqa: F401  # half an installation is none
    except ModuleNotFoundError as error:
        raise AdapterUnavailable(f"{error.name} is not installed: {INSTALL}") from None
    except ImportError as error:  # it is there, and does not go with what else is
        raise AdapterUnavailable(f"torch cannot be used here: {str(error).splitlines()[0]}: {INSTALL}") from None
    return torch


def _version(name: str, install: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise AdapterUnavailable(f"{name} is not installed: {install}") from None


def _list_cuda_weights(torch: Any, capability: tuple[int, int]) -> tuple[Precision, ...]:
    """Return the formats of a CUDA device. AMD's have other capabilities under the same name, and nobody tried them."""
    if torch.version.hip:
        return ()
    from adapters.torch_device.quantize import LEAST_FP8

    return (Precision.FP8, *_QUANTISED) if capability >= LEAST_FP8 else _QUANTISED


class TorchAdapter:
    """See the module and the contract. Devices are CPU and CUDA:0, CUDA:1, ..."""

    name = "torch_device"

    def devices(self) -> list[DeviceProfile]:
        """List the CPU and the CUDA devices. Raises AdapterUnavailable."""
        torch = import_torch()
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [self._cpu(torch), *(self._cuda(torch, index) for index in range(count))]

    def _cpu(self, torch: Any) -> DeviceProfile:
        native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return DeviceProfile(
            adapter=self.name,
            name="CPU",
            kind="cpu",
            full_name=f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
            memory_bytes=read_host_memory().total_bytes,
            in_host_memory=True,
            precisions=(Precision.BF16, Precision.FP32) if native else (Precision.FP32,),
            weights=_QUANTISED,
            memory_costs=_CPU_MEMORY,
        )

    def count_element_bytes(self, prepared: Path, options: LoadOptions) -> float:
        """See adapters.contract.WidensWeights: weights are widened to the activations' format, but for those in 8 and 4
        bits where products take them as they are."""
        chosen = options.numerical_class
        activations = chosen.activations if chosen is not None else options.activations or Precision.FP32
        stays = is_processor(options.device) and activations is not Precision.BF16
        if read_facts(prepared)["weights"] in (*_QUANTISED, Precision.FP8) and not stays:
            return 0.0
        return _ELEMENT_BYTES[activations]

    def _cuda(self, torch: Any, index: int) -> DeviceProfile:
        facts = torch.cuda.get_device_properties(index)
        native = (Precision.BF16,) if facts.major >= 8 else ()
        return DeviceProfile(
            adapter=self.name,
            name=f"CUDA:{index}",
            kind="cuda",
            full_name=str(facts.name),
            memory_bytes=int(facts.total_memory),
            precisions=(*native, Precision.FP16, Precision.FP32),
            weights=_list_cuda_weights(torch, (facts.major, facts.minor)),
        )

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        return _classes(self._profile(options.device), options)

    def _profile(self, device: str) -> DeviceProfile:
        devices = self.devices()
        profile = find_listed_device(devices, device)
        if profile is None:
            names = ", ".join(known.name for known in devices)
            raise Unsupported(f"torch sees no device {device!r} here; there is {names}")
        return profile

    def rates(self, device: str, threads: int) -> DeviceRates:
        """See adapters/rates.py. Raises AdapterUnavailable, Unsupported."""
        profile = self._profile(device)
        from adapters.torch_device.rates import measure_torch_rates

        return measure_torch_rates(profile, threads)

    def recipe(self, weights: WeightsFormat | None = None) -> str:
        """Name the format of the files, and the libraries that write them. Raises AdapterUnavailable, Unsupported."""
        gguf = f"gguf {_version('gguf', INSTALL)}"
        if weights is None:
            return f"decoder tensors by layer, the file's values, 2; {gguf}"
        if weights == FAST:
            return f"decoder tensors by layer, whole zeros, 1; {gguf}"
        if weights not in (*_QUANTISED, Precision.FP8):
            raise Unsupported(
                f"weights in {weights}: torch holds them in the activations' format, or in int8, int4 or (CUDA) fp8; "
                "leave them at as_file"
            )
        from adapters.torch_device.quantize import INSTALL as QUANTIZE

        return f"decoder tensors by layer, {weights} weights, 1; {gguf}; torchao {_version('torchao', QUANTIZE)}"

    def prepare(self, source: Path, target: Path, progress: Progress, weights: WeightsFormat | None = None) -> None:
        """Write the weights tensor by tensor; goes on with what an earlier call left. Needs torch only to quantise.

        Raises ModelRefused, Unsupported.
        """
        from adapters.decoder.source import open_source
        from adapters.torch_device.weights import write_weights

        if is_for_transformers(source):
            if weights is not None:
                raise Unsupported(f"weights in {weights}: transformers' own class has those of the file; use as_file")
            import_torch()
            from adapters.torch_device.any_decoder import prepare_directory

            prepare_directory(source, target, progress)
            return
        name = f"{source.name} to {weights}" if weights else source.name
        stage = f"convert {name}"
        progress(stage, -1.0)
        meter = SourceMeter(source, say_bytes(progress, stage))
        self.recipe(weights)
        opened = open_source(source, weights, meter.note)
        if weights in (None, FAST):
            write_weights(opened, target, meter)
        else:
            from adapters.torch_device.quantize import QuantizedTorchWeights

            exact = open_source(source, Precision.FP32, meter.note)
            write_weights(QuantizedTorchWeights(exact, Precision(weights)), target, meter)
        write_facts(target, facts_of(opened, source))
        progress(stage, 1.0)

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> TorchModel:
        return self.load_layers(prepared, options, LayerRange(0, read_facts(prepared)["layers"]), progress)

    def load_layers(self, prepared: Path, options: LoadOptions, layers: LayerRange, progress: Progress) -> TorchModel:
        import_torch()
        check_layers(layers, read_facts(prepared)["layers"])
        places = self._list_ranks(options)
        chosen = options.numerical_class or _classes(self._profile(options.device), options)[0][0]
        progress("load", 0.0)
        if read_facts(prepared).get("loader"):
            from adapters.torch_device.any_decoder import load_decoder

            model = load_decoder(prepared, options, chosen, layers, places)
        else:
            model = _load(prepared, options, chosen, layers, places)
        progress("load", 1.0)
        return model

    def list_rank_places(self, options: LoadOptions) -> Sequence[str]:
        return tuple(map(str, self._list_ranks(options)))

    def _list_ranks(self, options: LoadOptions) -> Sequence[RankPlace]:
        """Return a place for each rank: CUDA devices from the named one on, on the CPU a share of the threads each."""
        profile, count = self._profile(options.device), options.tensor_parallel
        if profile.kind == "cpu":
            threads = options.threads or (cores() if count > 1 else 0)
            shares = [threads // count + (rank < threads % count) for rank in range(count)]
            return [RankPlace(profile.name, max(1, share) if threads else 0) for share in shares]
        names = list_rank_devices(profile.name, count)
        present = {device.name for device in self.devices()}
        if missing := [name for name in names if name not in present]:
            raise Unsupported(
                f"tensor parallelism over {count} ranks takes {', '.join(names)}, and torch does not see "
                f"{', '.join(missing)} here. Set tensor_parallel to {count - len(missing)}, or name a lower device."
            )
        return [RankPlace(name, 0) for name in names]


def _classes(profile: DeviceProfile, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
    """See adapters.contract.Adapter.classes: the KV cache has the activations' format."""
    formats = [options.activations] if options.activations else list(profile.precisions)
    if formats[0] not in profile.precisions:
        raise Unsupported(
            f"{profile.name} does not compute in {formats[0]} natively; it does in {', '.join(profile.precisions)}"
        )
    left = [precision for precision in formats if options.kv_cache in (None, precision)]
    if not left:
        raise Unsupported(f"a KV cache in {options.kv_cache}: torch's is in the activations' format; leave it at auto")
    first = [NumericalClass(precision, precision) for precision in left]
    if options.exactness is not Exactness.BIT or profile.kind != "cpu":
        return [first]  # off the processor every forward is brought to one shape as it is (plan.shapes_for)
    return [first, [NumericalClass(precision, precision, fixed_width=FIXED_WIDTH) for precision in left]]


def _load(
    prepared: Path, options: LoadOptions, chosen: NumericalClass, layers: LayerRange, places: Sequence[RankPlace]
) -> TorchModel:
    from adapters.torch_device.failures import classify_torch_failure
    from adapters.torch_device.model import TorchModel, count_blocks, count_token_bytes
    from adapters.torch_device.ranks import load_ranks
    from adapters.torch_device.weights import read_decoder

    facts = read_facts(prepared)
    own = read_decoder(prepared).keep_layers(layers)
    spec = model_spec(facts, count_token_bytes(own, chosen.activations, len(places)))
    blocks = count_blocks(options, spec.bytes_per_token)
    try:
        memory, runner, part = load_ranks(prepared, options, chosen, layers, blocks, places)
    except (RuntimeError, MemoryError) as error:
        raise classify_torch_failure(error) from error
    return TorchModel(
        memory,
        runner,
        spec,
        options,
        part.shapes,
        weights=part.products.describe_storage(facts["weights"]),
        numerical_class=chosen,
        layers=layers,
        loras=part.loras,
    )
