"""The names of adapters and of their devices as values of keys: ours, and those that other distributions bring.

What is installed is looked up by whoever reads a file (load.py), which gives it as the validation's context. Without
one, any name that an adapter could have is right.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo, WithJsonSchema

from adapters.names import ADAPTER_NAME_PATTERN, OWN_ADAPTERS, SHARDING_ADAPTERS, normalise_device

AUTO = "auto"
"""The plan chooses (`placement`)."""
INSTALLED = "installed adapters"
"""The key of the context: a function that returns names of other distributions' adapters, and lines about those that
are not used."""


def _check_adapter(name: str, info: ValidationInfo) -> str:
    return _check(name, (*OWN_ADAPTERS, AUTO), info)


def _check_runtime(name: str, info: ValidationInfo) -> str:
    return _check(name, OWN_ADAPTERS, info)


def _check_sharding(name: str, info: ValidationInfo) -> str:
    if name in OWN_ADAPTERS and name not in SHARDING_ADAPTERS:
        raise ValueError(f"{describe_whole(name)}; name {list_sharding()}")
    return _check(name, SHARDING_ADAPTERS, info)


def describe_whole(adapter: str) -> str:
    """Say of an adapter that it cannot run shards."""
    return f"{adapter} loads whole models, and no ranges of layers"


def list_sharding() -> str:
    """Return our adapters that run shards of real models, for people."""
    *others, last = (name for name in SHARDING_ADAPTERS if name != "simulated")
    return f"{', '.join(others)} or {last}"


def _check(name: str, own: tuple[str, ...], info: ValidationInfo) -> str:
    """Return the name. Raises ValueError, which lists what is installed, for one that no adapter has here."""
    if name in own:
        return name
    look_up = (info.context or {}).get(INSTALLED)
    if look_up is None and name != AUTO and re.fullmatch(ADAPTER_NAME_PATTERN, name):
        return name
    others, refused = look_up() if look_up is not None else ([], [])
    if name in others:
        return name
    known = [*own, *others]
    notes = "; ".join(["" if others else "; no other distribution brings an adapter", *refused])
    raise ValueError(f"must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, not {name!r}{notes}")


def _describe(own: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema: an editor completes our own names, and accepts others'."""
    return {"anyOf": [{"enum": list(own)}, {"pattern": f"^{ADAPTER_NAME_PATTERN}$"}], "type": "string"}


AdapterName = Annotated[str, AfterValidator(_check_adapter), WithJsonSchema(_describe((*OWN_ADAPTERS, AUTO)))]
RuntimeName = Annotated[str, AfterValidator(_check_runtime), WithJsonSchema(_describe(OWN_ADAPTERS))]
"""The same without `auto`."""
ShardingName = Annotated[str, AfterValidator(_check_sharding), WithJsonSchema(_describe(SHARDING_ADAPTERS))]
"""One that loads ranges of layers."""


def _normalise(device: str, info: ValidationInfo) -> str:
    """Return the device as its runtime spells it. The section's `adapter` stands before it."""
    return normalise_device(info.data.get("adapter") or "", device)


DeviceName = Annotated[str, AfterValidator(_normalise)]
"""A device, written in any case."""
