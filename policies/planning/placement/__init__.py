"""Where target and drafts run: candidates -> filters, which give reasons -> score -> plan."""

from policies.planning.placement.planner import UNLIKE as UNLIKE
from policies.planning.placement.planner import plan_placement as plan_placement
