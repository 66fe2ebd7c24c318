"""How many of a model's layers a device holds, where the host's memory can have the rest of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from device_profiles.memory import LayerCosts, MemoryPlan
from device_profiles.units import human_bytes

KEPT_FREE = 0.05
"""Of a device's memory: for its driver, and for what a runtime allocates in larger pieces than it asked for. Not
measured."""
_FLOAT_BYTES = 4  # of a float32, in which activations and logits are


@dataclass(frozen=True, slots=True)
class LayeredModel:
    """A model by what can be where. `layer_bytes`: weights of each layer, and `layer_kv_bytes`: what it keeps of a
    position. `head_bytes`: of the output head, with a copy of the embedding that it is made of, if it is; without one
    it is `host_head_bytes`. `host_bytes`: weights that are never on the device. `vocabulary`, `hidden` and `mlp` are in
    elements."""

    layer_bytes: tuple[int, ...]
    layer_kv_bytes: tuple[int, ...]
    head_bytes: int
    host_head_bytes: int
    host_bytes: int
    vocabulary: int
    hidden: int
    mlp: int

    @property
    def layers(self) -> int:
        """How many layers there are; the output head counts as the last."""
        return len(self.layer_bytes) + 1


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """What is to fit: a KV cache over all layers, and so many sequences. `most`: layers on the device, None for all;
    `why`: what says so."""

    kv_cache_bytes: int
    slots: int
    most: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class LayerRoom:
    """Memory in bytes. `shared`: the device works in the host's."""

    device_total: int
    device_free: int
    host_free: int
    shared: bool

    @property
    def device(self) -> int:
        """What may be filled of the device's."""
        return max(0, self.device_free - int(KEPT_FREE * self.device_total))


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How many of all `layers` are on the device (the last ones, the output head among them), and what each side holds
    beside what the process does without the model. `shared`: the device works in the host's memory. `reason`: why not
    all, "" where all are."""

    on_device: int
    layers: int
    device: MemoryPlan
    host: MemoryPlan
    shared: bool = False
    reason: str = ""

    @property
    def has_all(self) -> bool:
        return self.on_device == self.layers

    def sum_host(self, process_bytes: int) -> MemoryPlan:
        """Return what is held of the host's memory, by a process that holds so much without the model."""
        sides = (self.host, self.device) if self.shared else (self.host,)
        sums = (sum(getattr(side, part) for side in sides) for part in ("weights", "kv_cache", "workspace"))
        return MemoryPlan(process_bytes, *sums)


class NoLayerRoom(Exception):
    """The host's memory does not hold what the device leaves to it. `needed_bytes`: beside the KV cache, of both where
    they share memory."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(needed_bytes)
        self.needed_bytes = needed_bytes


def plan_layers(model: LayeredModel, costs: LayerCosts, request: LayerRequest, room: LayerRoom) -> LayerPlan:
    """Return the plan with the most layers on the device that it, and the host, have room for. Raises NoLayerRoom."""
    most = model.layers if request.most is None else min(request.most, model.layers)
    refused: list[int] = []
    for on_device in range(most, -1, -1):
        device, host = count_sides(model, costs, request, on_device)
        if on_device and device.total > room.device:
            continue
        plan = LayerPlan(on_device, model.layers, device, host, room.shared)
        needed = plan.sum_host(0)
        if needed.total <= room.host_free:
            return replace(plan, reason=_explain(model, costs, request, room, on_device))
        refused.append(needed.total - needed.kv_cache)
    raise NoLayerRoom(min(refused))


def count_sides(
    model: LayeredModel, costs: LayerCosts, request: LayerRequest, on_device: int
) -> tuple[MemoryPlan, MemoryPlan]:
    """Return what the device and the host hold with so many layers on the device."""
    split = model.layers - on_device  # the first layer on the device
    has_head = on_device > 0
    weights = sum(model.layer_bytes[split:]) + (model.head_bytes if has_head else 0)
    left = model.host_bytes + sum(model.layer_bytes[:split]) + (0 if has_head else model.host_head_bytes)
    kv_cache = [_count_kv(model, costs, request, part) for part in (slice(split, None), slice(0, split))]
    rows = costs.slot_rows * request.slots * _FLOAT_BYTES
    values = int(rows * (costs.mlp_floats * model.mlp + costs.hidden_floats * model.hidden))
    logits = rows * model.vocabulary
    device = MemoryPlan(0, weights, kv_cache[0], costs.device_bytes + values + logits)
    if not has_head:
        device = MemoryPlan(0, 0, 0, 0)
    on_host = values if split else 0
    host = MemoryPlan(0, left, kv_cache[1], costs.host_bytes + on_host + logits + (0 if has_head else logits))
    return device, host


def describe_layers(plan: LayerPlan, device: str) -> str:
    split = f"{plan.on_device} of {plan.layers} layers on {device} ({_describe_side(plan.device)})"
    split += f", in the host's memory {_describe_side(plan.host)}"
    return f"{split}: {plan.reason}" if plan.reason else split


def _describe_side(side: MemoryPlan) -> str:
    sizes = (("weights", side.weights), ("KV cache", side.kv_cache), ("buffers", side.workspace))
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes)


def _count_kv(model: LayeredModel, costs: LayerCosts, request: LayerRequest, part: slice) -> int:
    """Return the KV cache of these layers: their share of it, and what sequences hold beside that they use."""
    position, own = sum(model.layer_kv_bytes), sum(model.layer_kv_bytes[part])
    if not own:
        return 0
    used = costs.kv_copies * request.kv_cache_bytes * own / position
    return int(used) + request.slots * costs.slot_positions * own


def _explain(model: LayeredModel, costs: LayerCosts, request: LayerRequest, room: LayerRoom, on_device: int) -> str:
    if on_device == model.layers:
        return ""
    if request.most is not None and on_device >= request.most:
        return request.why
    more = count_sides(model, costs, request, on_device + 1)[0].total
    if more <= room.device:
        return "the host's memory, in which the device works, holds no more"
    return f"{on_device + 1} take {human_bytes(more)}, and {human_bytes(room.device)} may be filled"
