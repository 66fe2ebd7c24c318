"""Where target and drafts run: candidates -> filters, which give reasons -> score -> plan."""

from policies.planning.placement.planner import plan

__all__ = ["plan"]
