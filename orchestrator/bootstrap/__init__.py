"""The only place that names concrete classes: turns a configuration into an engine, a cluster and a worker."""

from __future__ import annotations

from orchestrator.bootstrap.canary import build_trial as build_trial
from orchestrator.bootstrap.clusters import build_cluster as build_cluster
from orchestrator.bootstrap.drafters import build_drafter as build_drafter
from orchestrator.bootstrap.engine import build_loop as build_loop
from orchestrator.bootstrap.engine import first_cost as first_cost
from orchestrator.bootstrap.models import Target as Target
from orchestrator.bootstrap.models import load_target as load_target
from orchestrator.bootstrap.models import load_tokenizer as load_tokenizer
from orchestrator.bootstrap.options import EngineOptions as EngineOptions
from orchestrator.bootstrap.options import engine_options as engine_options
from orchestrator.bootstrap.options import objectives_of as objectives_of
