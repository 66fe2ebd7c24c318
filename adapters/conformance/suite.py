"""All of the suite, for `from adapters.conformance.suite import *`: its tests, and the fixtures that they use."""

from adapters.conformance.contract_tests import *  # noqa: F403
from adapters.conformance.fixtures import *  # noqa: F403
from adapters.conformance.invariance_tests import *  # noqa: F403
