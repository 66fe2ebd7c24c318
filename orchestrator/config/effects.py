"""How a change of each key of cluster.yaml takes effect in a daemon that runs. The one table of that."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from orchestrator.config.further_target import OWN_KEYS
from orchestrator.config.source_text import Place


class Effect(StrEnum):
    """How a change takes effect. Those further down take more."""

    LIVE = "live"
    """At once. No process is replaced."""
    DRAFTS = "drafts"
    """Live workers exchange their drafters. The target goes on."""
    ROLL = "roll"
    """Workers of the target are replaced: new ones load beside those that serve, then streams move."""
    RESTART = "restart"
    """With the next start of the daemon. Until then the old value holds."""


ORDER: Final = tuple(Effect)

MEANINGS: Final[Mapping[Effect, str]] = MappingProxyType(
    {
        Effect.LIVE: "at once; no process is replaced",
        Effect.DRAFTS: "live: workers of the target load the new drafters beside the old ones, and exchange them",
        Effect.ROLL: "new workers of the target load beside those that serve; when all are ready, streams move",
        Effect.RESTART: "with the next start of the daemon; until then the old value holds",
    }
)
"""What each effect means, for the documentation."""

_TABLE: Final[dict[Effect, dict[str, str]]] = {
    Effect.LIVE: {
        "speculation": "method num_speculative_tokens max_predicted_tokens min_speculative_tokens pid "
        "low_acceptance_rate acceptance "
        "allow_tolerance tolerance_acceptance_rate tolerance_delta tolerance_warmup_tokens tolerance_max_delta",
        "routing": "weights hysteresis",
        "model": "alike",
        "failover": "after_s back_after_s other_bits",
        "limits": "max_waiting max_itl_ms prefix_reuse request_timeout_s quarantine_s max_body max_parameters "
        "max_grammar max_bodies translation_timeout_s max_requests_per_key max_tokens_per_minute_per_key "
        "drain_timeout_s",
        "slo": "ttft_ms ttft_percentile tpot_ms tpot_percentile max_round_ms late",
        "api": "stalled_after_s max_connections header_timeout_s body_timeout_s idle_timeout_s write_timeout_s "
        "headers_after_s keep_alive_s allow_chat_templates stored_responses stored_responses_memory stored_responses_s",
        "batches": "max_file max_storage max_files max_batches keep_s",
        "logging": "level",
    },
    Effect.DRAFTS: {"drafts": ""},
    Effect.ROLL: {
        "model": "adapter adapters device exactness weights activations kv_cache_precision replicas shards "
        "tensor_parallel device_layers static_shapes static_context_tokens static_prefill_rows static_verify_rows",
        "devices": "threads cores",
        "placement": "objective concurrency prompt_tokens output_tokens draft_acceptance pin_target pin_draft "
        "exclude anti_affinity replicas_apart zones sharding standby keep_free profile improve "
        "drift_tolerance replan_pause_s drift_after_s load_lasts_s score_weights",
        "failover": "standby",
        "limits": "kv_cache kv_disk max_running max_batch_rows",
    },
    Effect.RESTART: {
        "model": "source name keep idle_s output_format",
        "models": "",
        "canary": "",
        "limits": "models_memory",
        "devices": "price_per_hour",
        "placement": "currency load_smoothing profile_budget_s",
        "hosts": "",
        "links": "",
        "api": "host port admin_socket keys_file allow_keyless metrics_without_key allowed_hosts allowed_origins "
        "tls vllm_metric_names",
        "cluster": "",
        "adapters": "",
        "store": "",
        "state": "",
        "journal": "",
        "batches": "enabled concurrency",
        "alerts": "every_s time_factor webhook",
        "logging": "format prompts audit_file",
        "tracing": "",
    },
}

"""The keys of each section, by the effect of their change; "" is the section as a whole. What stands below a key shares
its line. A key of `models[]` has the line of the key that it is written as."""


def _list_places(section: str, names: str) -> list[Place]:
    return [(section, name) for name in names.split()] or [(section,)]


EFFECTS: Final[Mapping[Place, Effect]] = MappingProxyType(
    {
        place: effect
        for effect, sections in _TABLE.items()
        for section, names in sections.items()
        for place in _list_places(section, names)
    }
)
"""By the place of each line of the table."""


def find_effect(place: Place) -> Effect:
    """Return how a change at a place of the file takes effect. Raises KeyError where the table has no line for it."""
    line = find_line(place)
    if line is None:
        raise KeyError(place)
    return EFFECTS[line]


def find_line(place: Place) -> Place | None:
    """Return the table's line for a place of the file; None where there is none."""
    known = _as_of_one(place)
    return next((known[:length] for length in (2, 1) if known[:length] in EFFECTS), None)


def list_lines(effect: Effect) -> list[tuple[str, tuple[str, ...]]]:
    """Return the sections that have keys of this effect, and those keys; () for the section as a whole."""
    return [(section, tuple(names.split())) for section, names in _TABLE[effect].items()]


def _as_of_one(place: Place) -> Place:
    """Return where a value of `models[]` would stand if its target were the only one."""
    if len(place) < 3 or place[0] != "models":
        return place
    rest = place[2:]
    if rest[0] in OWN_KEYS:
        return rest
    section = next((name for name, keys in OWN_KEYS.items() if rest[0] in keys), "model")
    return (section, *rest)


_READ_BY_WORKERS: Final = ("method", "num_speculative_tokens", "max_predicted_tokens", "pid", "low_acceptance_rate")

_OF_WORKERS: Final[frozenset[Place]] = frozenset(
    [place for place, effect in EFFECTS.items() if effect in (Effect.DRAFTS, Effect.ROLL)]
    + [("speculation", name) for name in _READ_BY_WORKERS]
    + [("speculation", f"tolerance_{name}") for name in ("acceptance_rate", "delta", "warmup_tokens", "max_delta")]
    + [("slo", name) for name in ["ttft_ms", "ttft_percentile", "tpot_ms", "tpot_percentile", "max_round_ms"]]
    + [("limits", "max_itl_ms"), ("limits", "prefix_reuse")]
)


def is_of_workers(place: Place) -> bool:
    """Return whether workers of the target read the value at a place, and not only the daemon."""
    return find_line(place) in _OF_WORKERS
