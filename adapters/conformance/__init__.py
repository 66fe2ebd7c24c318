"""The conformance suite: what adapters/contract.py promises, as tests that the author of an adapter can run.

A file of the author's own tests (docs/adapters.md) names the adapter, and has all of it:

    import pytest
    from adapters.conformance import Case
    from adapters.conformance.suite import *

    @pytest.fixture(scope="session")
    def case() -> Case:
        return Case(adapter="my_npu", device="NPU0", source="models/small.gguf")

It needs pytest: `outrider extras install conformance`. Nothing of the product imports it.
"""

import pytest

pytest.register_assert_rewrite("adapters.conformance.contract_tests", "adapters.conformance.invariance_tests")

from adapters.conformance.case import Case as Case  # noqa: E402  # its assertions are rewritten from here on
