"""The identities of models in the options of workers, wherever these name one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import msgspec

from adapters.model_identity import ModelIdentity, ServedClass
from orchestrator.protocol.contract import WorkerSpec

_KEY: Final = "identity"
_OF_A_MODEL: Final = frozenset({"source", "store", _KEY})
"""Keys that the options of a model have, and no others (protocol.load_options.ModelOptions)."""


Classes = Mapping[str, list[ServedClass]]
"""In which numerical classes models are served, by the digest of their content."""


def pin_options(
    options: Mapping[str, Any], known: Mapping[str, ModelIdentity], classes: Classes = MappingProxyType({})
) -> dict[str, Any]:
    """Return options with the identities that are known, where they have none, and with the classes that are served."""

    def pin(model: dict[str, Any]) -> dict[str, Any]:
        own = model[_KEY]
        identity = known.get(model["source"]) if own is None else msgspec.convert(own, ModelIdentity)
        if identity is None:
            return model
        served = classes.get(identity.digest, identity.classes)
        return {**model, _KEY: msgspec.to_builtins(replace(identity, classes=served))}

    return dict(_map_models(options, pin))


def pin_spec(
    spec: WorkerSpec, known: Mapping[str, ModelIdentity], classes: Classes = MappingProxyType({})
) -> WorkerSpec:
    """Return how a worker and its parts are started where some identities are known, and classes that are served."""
    return _map_spec(spec, lambda options: pin_options(options, known, classes)) if known or classes else spec


def drop_identities(spec: WorkerSpec) -> WorkerSpec:
    """Return how a worker and its parts would be started where nothing is known of identities."""
    return _map_spec(spec, lambda options: dict(_map_models(options, lambda model: {**model, _KEY: None})))


def list_pinned(options: Mapping[str, Any]) -> dict[str, ModelIdentity]:
    """Return the identities that a worker's options ask for, by source."""
    pinned: dict[str, ModelIdentity] = {}

    def note(model: dict[str, Any]) -> dict[str, Any]:
        if model[_KEY] is not None:
            pinned[model["source"]] = msgspec.convert(model[_KEY], ModelIdentity)
        return model

    _map_models(options, note)
    return pinned


def _map_spec(spec: WorkerSpec, change: Callable[[dict[str, Any]], dict[str, Any]]) -> WorkerSpec:
    parts = [_map_spec(part, change) for part in spec.parts]
    return msgspec.structs.replace(spec, options=change(spec.options), parts=parts)


def _map_models(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(value, dict):
        changed = {key: _map_models(item, change) for key, item in value.items()}
        return change(changed) if changed.keys() >= _OF_A_MODEL else changed
    if isinstance(value, list | tuple):
        return [_map_models(item, change) for item in value]
    return value
