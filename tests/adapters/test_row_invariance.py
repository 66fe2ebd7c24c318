"""The shipped suite (adapters/conformance) over our own adapters: rows that are the same to the bit."""

from __future__ import annotations

from adapters.conformance.invariance_tests import *  # noqa: F403
