"""What a model's profile is known by: whatever changes a cost, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from device_profiles.measured import FEW_LAYERS, SPLIT, MeasuredModel
from device_profiles.profile import DeviceProfile
from device_profiles.store import ProfileStore
from orchestrator.machine.devices import threads_on
from orchestrator.protocol.load_options import ModelOptions


@dataclass(frozen=True, slots=True)
class ProfileKey:
    fingerprint: str
    """Of hardware, driver and runtime."""
    adapter: str
    role: str
    exactness: str
    threads: int
    digest: str
    """Of the model's files."""
    formats: str
    """As they are asked for."""


def build_profile_key(
    options: ModelOptions, role: str, mark: str, threads: int, digest: str, *, few: bool = False
) -> ProfileKey:
    """Return what the profile of a model that is to be loaded so is known by. `few`: of some of its layers."""
    formats = formats_of(options, few=few)
    return ProfileKey(mark, options.adapter, role, options.exactness, threads, digest, formats)


def find_profile(store: ProfileStore, key: ProfileKey) -> MeasuredModel | None:
    """Return the profile of this key; None where there is none."""
    for profile in store.models(key.fingerprint):
        run_as = (profile.adapter, profile.role, profile.exactness, profile.threads)
        if ProfileKey(profile.fingerprint, *run_as, profile.model_digest, profile.formats) == key:
            return profile
    return None


def profiles_in(store: Path) -> ProfileStore:
    return ProfileStore(store / "profiles")


def threads_of(options: ModelOptions, device: DeviceProfile) -> int:
    """Return how many threads a model's runtime takes on a device."""
    return threads_on(device, options.threads)


def formats_of(options: ModelOptions, *, few: bool = False) -> str:
    """Return the number formats that were asked for, as in "auto auto auto": what they come to is known when the model
    is loaded. Behind them stands over how many ranks its layers are split, where they are, or that only a `few` of
    them are loaded."""
    formats = f"{options.weights} {options.activations} {options.kv_cache_precision}"
    if few:
        return f"{formats} {FEW_LAYERS}"
    return f"{formats} {SPLIT}{options.tensor_parallel}" if options.tensor_parallel > 1 else formats
