"""The shipped suite (adapters/conformance) over a model whose layers are split: the contract's promises hold for it."""

from __future__ import annotations

from adapters.conformance.contract_tests import *  # noqa: F403
from adapters.conformance.invariance_tests import *  # noqa: F403
