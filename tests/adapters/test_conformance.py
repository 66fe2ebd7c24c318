"""The shipped suite (adapters/conformance) over our own adapters: the contract's promises, and rows that are the same
to the bit. In one file, so that one process loads a model once."""

from __future__ import annotations

from adapters.conformance.case import Prepared, load
from adapters.conformance.contract_tests import *  # noqa: F403
from adapters.conformance.invariance_tests import *  # noqa: F403
from device_profiles.profile import Exactness


def test_kernel_exactness_of_our_runtimes_says_that_it_is_not_invariant(prepared: Prepared):
    if prepared.adapter.name == "simulated":
        return
    loaded = load(prepared, exactness=Exactness.KERNEL)
    assert loaded.capabilities.min_rows == 1
    assert loaded.capabilities.row_invariant is False
    loaded.close()
