"""Where target and drafts run: candidates -> filters, which give reasons -> score -> plan."""

from policies.planning.placement.planner import plan_placement

__all__ = ["plan_placement"]
