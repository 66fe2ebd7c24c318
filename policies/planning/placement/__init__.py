"""Where target and drafts run: candidates -> filters, which give reasons -> score -> plan."""

from policies.planning.placement.planner import UNLIKE, plan_placement

__all__ = ["UNLIKE", "plan_placement"]
