"""What was measured of drafts, as the planner takes it."""

from device_profiles.acceptance import DepthYield, PairAcceptance
from orchestrator.planning.wanted import SUFFIX, build_measured_drafter, build_measured_drafters

POOR, GOOD = DepthYield(4, (0.4,), (0.1,), 90), DepthYield(12, (0.8, 0.4), (0.6, 0.3), 90, 0.5)


def pair(rule, sequences, adapter, found=GOOD):
    return PairAcceptance("t", "digest", "suffix", "chat", rule, sequences, (POOR, found), 0.1, adapter=adapter)


def test_each_runtime_has_its_own_figures_of_the_policy():
    pairs = [pair("fixed", 1, ""), pair("policy", 1, "a"), pair("policy", 4, "b", POOR), pair("policy", 1, "b", POOR)]
    first, other = build_measured_drafters(SUFFIX, "suffix", pairs, "t", 1, 12)
    assert (first.runtime, other.runtime) == ("a", "b")
    assert first.by_policy
    assert other.by_policy
    assert first.coverage == 0.8 > other.coverage == 0.4
    assert first.serves("a")
    assert not first.serves("b")
    assert SUFFIX.serves("b")


def test_where_no_policy_was_measured_one_drafter_serves_all():
    (found,) = build_measured_drafters(SUFFIX, "suffix", [pair("fixed", 1, "")], "t", 1, 12)
    assert (found.runtime, found.by_policy) == ("", False)
    assert build_measured_drafters(SUFFIX, "suffix", [], "t", 1, 12) == [SUFFIX]
    fixed = build_measured_drafter(
        SUFFIX, "suffix", [pair("policy", 1, "a"), pair("fixed", 1, "")], "t", 1, 4, rule="fixed", runtime="a"
    )
    assert not fixed.by_policy
    assert fixed.coverage == 0.4
