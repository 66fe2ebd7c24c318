"""What the models of a file take of devices where some of them come and go, and whether each can have its turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapters.contract import AdapterError
from adapters.device_memory import read_host_memory, read_nvidia_memory
from adapters.vocabulary import SIMULATED_PREFIX
from device_profiles.device_names import CPU_KIND, CUDA_KIND, find_index, name_compute_unit, split_device
from device_profiles.units import human_bytes
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.source_text import Place
from orchestrator.daemon.bootstrap.plan_board import measure_fixed
from orchestrator.daemon.control.replicas.residency import ResidencyTerms
from orchestrator.errors import OutriderError
from policies.serving.residency import find_misfit


@dataclass(frozen=True, slots=True)
class ModelsMemory:
    """What each model needs and each device has, in bytes by "HOST/DEVICE". `unknown`: in words, what is not known, so
    that nothing gives way for it."""

    terms: tuple[ResidencyTerms, ...]
    memory: Mapping[str, int]
    unknown: tuple[str, ...]

    @property
    def at_start(self) -> list[int]:
        """Return the models, by their places, that are loaded without a request."""
        return [number for number, each in enumerate(self.terms) if each.keep != "on_demand"]


def come_and_go(targets: Sequence[ClusterConfig]) -> bool:
    return any(target.model.keep != "always" for target in targets)


def measure_models(targets: Sequence[ClusterConfig], base: Path) -> ModelsMemory:
    """Return what these models take before they are loaded: weights, KV caches, drafts. May read models' files."""
    needs, unknown = [], []
    for target in targets:
        model_needs, why = _measure_needs(target, base)
        needs.append(model_needs)
        unknown += [f"what {target.model.name} needs: {why}"] if why else []
    limit = targets[0].limits.models_memory
    simulated = all(target.model.source.startswith(SIMULATED_PREFIX) for target in targets)
    memory = {}
    for device in dict.fromkeys(device for model_needs in needs for device in model_needs):
        total = int(limit) if limit is not None else None if simulated else _read_total(device)
        if total is None:
            unknown.append(f"how much memory models may have on {device}: set limits.models_memory")
        else:
            memory[device] = total
    pairs = zip(targets, needs, strict=True)
    terms = tuple(ResidencyTerms(target.model.keep, target.model.idle_s, model_needs) for target, model_needs in pairs)
    return ModelsMemory(terms, memory, tuple(unknown))


def explain_misfit(targets: Sequence[ClusterConfig], models_memory: ModelsMemory) -> tuple[Place, str] | None:
    """Return where in the file, and why, models cannot all have their turn; None where they can."""
    needs = [each.needs for each in models_memory.terms]
    pinned = [number for number, each in enumerate(models_memory.terms) if each.keep == "always"]
    misfit = find_misfit(needs, pinned, models_memory.memory)
    if misfit is None:
        return None
    parts = [
        f"{targets[number].model.name} {human_bytes(needs[number][misfit.device])} ({targets[number].model.keep})"
        for number in misfit.models
    ]
    together = f"{' and '.join(parts)}{f' are {human_bytes(misfit.needed_bytes)}' if len(parts) > 1 else ''}"
    way_out = "take a smaller KV cache or model, or let fewer models stay (keep: on_demand)"
    text = f"on {misfit.device} models may have {human_bytes(misfit.memory_bytes)}, and {together}; {way_out}"
    return targets[misfit.models[-1]].find_place("model", "keep"), text


def list_residency_misfits(config: ClusterConfig, base: Path) -> Iterator[tuple[Place, str]]:
    if come_and_go(config.targets):
        misfit = explain_misfit(config.targets, measure_models(config.targets, base))
        if misfit is not None:
            yield misfit


def _measure_needs(target: ClusterConfig, base: Path) -> tuple[dict[str, int], str]:
    """Return the bytes that a target needs by device, and why they are not known ("": they are)."""
    if target.planned:
        return {}, "a plan decides where it is"
    needs: Counter[str] = Counter()
    try:
        for place in measure_fixed(target, base):
            if place.fixed is not None:
                unit = name_compute_unit(place.fixed.device)
                kind = split_device(place.fixed.device)[0]
                needs[f"{place.host or 'any'}/{unit}"] += place.fixed.memory_bytes(
                    kind if kind in (CPU_KIND, "npu") else "gpu"
                )
    except (OutriderError, AdapterError, OSError) as error:
        return {}, str(error)
    return dict(needs), ""


def _read_total(device: str) -> int | None:
    host, _, unit = device.partition("/")
    if host != THIS_NODE:
        return None
    if unit == CPU_KIND:
        return read_host_memory().total_bytes
    index = find_index(unit)
    card = read_nvidia_memory(index) if split_device(unit)[0] == CUDA_KIND and index is not None else None
    return card.total_bytes if card is not None else None
