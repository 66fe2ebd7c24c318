"""The shipped suite (adapters/conformance) over models in layer shards: the contract's promises hold for them too."""

from __future__ import annotations

from adapters.conformance.contract_tests import *  # noqa: F403
from adapters.conformance.invariance_tests import *  # noqa: F403
