"""`system_fingerprint`: changes exactly when what decides the output's bits changes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.metadata import version

from orchestrator.daemon.control.port import StateView
from orchestrator.protocol.ready import Ready
from policies.sampling import Rule

STANDBY_HEADER = "X-Outrider-Standby"


@dataclass(frozen=True, slots=True)
class AnswerSource:
    """Which worker said it: its `fingerprint`, and where it is a standby its name, with whether its bits are the
    target's ("standby; bits=same")."""

    fingerprint: str | None
    standby: str = ""


def describe_source(view: StateView, engine: int, rule: Rule) -> AnswerSource:
    """Return what an answer says of the replica that its tokens come from."""
    replica = next((replica for replica in view.replicas if replica.engine == engine), None)
    if replica is None or replica.ready is None:
        return AnswerSource(system_fingerprint(view.ready, rule))
    standby = f"{replica.name}; bits={'other' if replica.unlike else 'same'}" if replica.standby else ""
    return AnswerSource(system_fingerprint(replica.ready, rule), standby)


def system_fingerprint(ready: Ready | None, rule: Rule = "coupled") -> str | None:
    """Return "fp_" and 12 hex digits over the effective state of the worker.

    The state is model file and vocabulary, weights, activations and KV cache formats, runtime and device, exactness,
    and this program's version. None before the first worker is ready.

    Drafters, depths and bounds are left out: they do not change the output. Under the rules "rejection" and "tolerance"
    they do, and there the rule, the drafters and the depth count too. But the drafts themselves are not in it. With
    `exactness: kernel` the rest of the batch is not in it either.
    """
    if ready is None:
        return None
    parts: tuple[str, ...] = (
        ready.model.name,
        ready.model.vocabulary_fingerprint,
        ready.model.digest,
        ready.precision.weights,
        ready.precision.activations,
        ready.precision.kv_cache,
        ready.device.adapter,
        ready.device.name,
        ready.device.full_name,
        ready.precision.exactness,
        str(ready.precision.row_invariant),
        ready.precision.numerical_class,
        f"static {ready.model.context_tokens}" if ready.device.static_widths else "dynamic",
        version("outrider"),
    )
    if rule in ("rejection", "tolerance"):
        parts += (rule, *ready.drafting.drafters, str(ready.drafting.max_depth))
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
