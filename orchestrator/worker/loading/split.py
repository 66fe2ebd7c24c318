"""What a model is whose layers are split over ranks: where these are, and how its bits are known."""

from __future__ import annotations

from adapters.contract import ALL_LAYERS, Adapter, LoadOptions, TensorParallelAdapter, Unsupported
from device_profiles.profile import DeviceProfile
from orchestrator.machine.devices import class_mark_of, join_marks
from orchestrator.protocol.load_options import ModelOptions


def describe_split(options: ModelOptions, adapter: Adapter) -> str:
    """Return over what a model's layers are split, "" where they are not. Raises Unsupported, AdapterUnavailable."""
    if options.tensor_parallel == 1:
        return ""
    if not isinstance(adapter, TensorParallelAdapter):
        raise Unsupported(f"{adapter.name} cannot split layers; take another adapter, or leave tensor_parallel out")
    load = LoadOptions(
        device=options.device, threads=options.threads, static=options.static, tensor_parallel=options.tensor_parallel
    )
    places = adapter.list_rank_places(load)
    return f"tensor parallel over {len(places)} ranks: {' + '.join(places)}"


def mark_bits(device: DeviceProfile, options: ModelOptions, device_layers: int = ALL_LAYERS) -> str:
    """Return the fingerprint that a model's numerical classes are kept by on a device: sums of parts of layers have
    other bits than whole layers, and layers on the host others than on the device."""
    split = [f"tensor parallel {options.tensor_parallel}"] if options.tensor_parallel > 1 else []
    some = [f"{device_layers} layers"] if device_layers != ALL_LAYERS else []
    return join_marks([class_mark_of(device), *split, *some])
