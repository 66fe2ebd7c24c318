"""The identities of models in the options of workers, wherever these name one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from adapters.model_identity import ModelIdentity
from orchestrator.protocol.contract import WorkerSpec

_KEY: Final = "identity"
_OF_A_MODEL: Final = frozenset({"source", "store", _KEY})
"""Keys that the options of a model have, and no others (protocol.load_options.ModelOptions)."""


def pin_options(options: Mapping[str, Any], known: Mapping[str, ModelIdentity]) -> dict[str, Any]:
    """Return options with the identities that are known, in place of none, or of equal ones."""

    def pin(model: dict[str, Any]) -> dict[str, Any]:
        identity, own = known.get(model["source"]), model[_KEY]
        if identity is None or (own is not None and msgspec.convert(own, ModelIdentity) != identity):
            return model
        return {**model, _KEY: msgspec.to_builtins(identity)}

    return dict(_map_models(options, pin))


def pin_spec(spec: WorkerSpec, known: Mapping[str, ModelIdentity]) -> WorkerSpec:
    """Return how a worker and its parts are started where some identities are known."""
    return _map_spec(spec, lambda options: pin_options(options, known)) if known else spec


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
