"""The trial that a configuration asks for."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.config.canary_kept import differences, to_keep
from orchestrator.config.drafts import draft_names, own_draft_names
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.control.port import Control
from orchestrator.daemon.control.rollout.canary import CanaryTerms, CanaryTrial, TrialFile
from orchestrator.fitting.worker_options import CANARY_PREFIX
from policies.serving.canary import PromotionRule

_NAME_BYTES = 8


def build_trial(config: ClusterConfig, path: Path, control: Control, clock: Clock) -> CanaryTrial | None:
    """Return the trial, which goes on where the last daemon of this configuration left it; None without a canary.
    Raises ConfigError where the file at `path` is no configuration any more."""
    canary = config.canary
    if not canary.share:
        return None
    name = _name_of(config, path)
    terms = CanaryTerms(
        share=canary.share,
        by_rule=canary.decide == "rule",
        rule=PromotionRule(
            canary.least_requests, canary.most_requests, canary.min_gain, canary.tolerance, canary.least_agreement
        ),
        differs=tuple(differences(config)),
        to_keep=tuple(to_keep(config, path)),
        drafters=_own_drafters(config),
        acceptance=None if canary.speculation.acceptance == "same" else canary.speculation.acceptance,
    )
    return CanaryTrial(terms, name, TrialFile(store_directory(config) / "canary" / f"{name}.json"), control, clock)


def _own_drafters(config: ClusterConfig) -> frozenset[str]:
    """Return what drafters are called that only the canary has. Those of everybody may be among them, where speculation
    is off for the others, or a plan leaves them without."""
    own = config.canary_drafts or config.drafts
    names = {*draft_names(own, CANARY_PREFIX)}
    if not config.speculation.depth:
        names |= {*draft_names(own)}
        for number, replica in enumerate(config.model.placements):
            names |= {*own_draft_names(replica.own_drafts or (), number, config.drafts)}
    return frozenset(names)


def _name_of(config: ClusterConfig, path: Path) -> str:
    """Return what is other for every configuration in which figures may be others, and for every place of one."""
    settings = config.model_dump_json(exclude={"journal", "logging", "state", "store"}, exclude_defaults=True)
    return blake2b(f"{path.resolve()}\n{settings}".encode(), digest_size=_NAME_BYTES).hexdigest()
