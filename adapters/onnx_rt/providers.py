"""Execution providers by the device that cluster.yaml names: what they are called, and what each of them needs.

A device is `NAME` or `NAME:WHICH`: `CPU`, `CUDA`, `CUDA:1`, `DirectML:0`, `OpenVINO:GPU`. It is the only provider that
a session gets, so that nothing runs anywhere else unseen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from adapters.contract import Unsupported
from device_profiles.device_names import split_device

SUFFIX = "ExecutionProvider"
FATAL = 4
"""Log severity: failures reach us as exceptions, and a copy on standard error only confuses."""
_NO_DEVICES = ("AzureExecutionProvider",)  # a client of remote endpoints, present in every build
_FIXED = (
    "it runs graphs of fixed shape with quantised operators (QDQ), compiled ahead of time, and this adapter's graph "
    "is not one"
)


@dataclass(frozen=True, slots=True)
class Provider:
    """`device`: its name in cluster.yaml. `install`: how it is installed. `which`: the option that chooses among
    several devices, "" where there is one. `options` are always given. `refusal`: why our graph cannot run on it."""

    device: str
    install: str
    provider: str = ""
    which: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""

    @property
    def name(self) -> str:
        return self.provider or f"{self.device}{SUFFIX}"


_KNOWN = (
    Provider("CPU", "pip install onnxruntime"),
    # Products of float32 are float32: without this, CUDA rounds their factors to 10 bits.
    Provider("CUDA", "pip install onnxruntime-gpu", which="device_id", options={"use_tf32": "0"}),
    Provider("DirectML", "pip install onnxruntime-directml", "DmlExecutionProvider", which="device_id"),
    Provider("OpenVINO", "pip install onnxruntime-openvino", which="device_type"),
    Provider("QNN", "pip install onnxruntime-qnn", refusal=_FIXED),
    Provider("VitisAI", "AMD's Ryzen AI software", refusal=_FIXED),
)


@dataclass(frozen=True, slots=True)
class ProviderChoice:
    device: str
    provider: str
    options: dict[str, str]


def device_names(available: Sequence[str]) -> list[str]:
    """Return the devices of the providers that ONNX Runtime calls `available`, under their names in cluster.yaml."""
    names = {known.name: known.device for known in _KNOWN}
    return [names.get(name, name.removesuffix(SUFFIX)) for name in available if name not in _NO_DEVICES]


def choose_provider(device: str, available: Sequence[str]) -> ProviderChoice:
    """Return what a session for a device is made with.

    Raises Unsupported, naming what is there and how to install it, where the provider is missing; with the reason
    where our graph cannot run on it.
    """
    kind, which = split_device(device)
    unknown = Provider(device.partition(":")[0], "")
    provider = next((known for known in _KNOWN if known.device.casefold() == kind), unknown)
    name = provider.device
    if provider.name not in available or provider.name in _NO_DEVICES:
        raise Unsupported(
            f"this ONNX Runtime has no execution provider for {name!r}; it has {', '.join(device_names(available))}."
            f"{_way_out(provider)}"
        )
    if provider.refusal:
        raise Unsupported(f"{name}: {provider.refusal}. On an Intel NPU, adapter openvino_rt has static shapes.")
    if which and not provider.which:
        raise Unsupported(f"{device!r}: {name} has one device; write {name}")
    return ProviderChoice(device, provider.name, dict(provider.options) | ({provider.which: which} if which else {}))


def _way_out(provider: Provider) -> str:
    if not provider.install:
        return f" Known are {', '.join(known.device for known in _KNOWN)}."
    return f" What brings it: {provider.install}"


def confirm(choice: ProviderChoice, taken: Sequence[str]) -> None:
    """Raise Unsupported when a session has `taken` another provider than it was asked for."""
    if not taken or taken[0] != choice.provider:
        raise Unsupported(
            f"ONNX Runtime took {taken[0] if taken else 'no provider'} where {choice.provider} was asked for; "
            "its log says what that provider is missing"
        )
