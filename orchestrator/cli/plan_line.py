"""What the running plan predicts, what came of it, and what it rests on, in a line."""

from __future__ import annotations

from typing import Any


def plan_line(plan: dict[str, Any]) -> str:
    """Return what the running plan predicts, and what came of it."""
    line = f"best for {plan['objective']}; {plan['predicted_tokens_per_s']:.1f} tokens/s predicted"
    if plan["missing"]:
        lost = ", ".join(one["name"] for one in plan["missing"])
        line += f", {plan['serving_tokens_per_s']:.1f} of it by what serves ({lost} does not)"
    if cost := plan["predicted_cost_per_million_tokens"]:
        line += f", {cost:.3g} {plan['currency']} a million tokens"
    if joules := plan["predicted_joules_per_token"]:
        line += f", {joules:.3g} J a token"
    if plan["rounds"]:
        line += (
            f", {plan['measured_tokens_per_s']:.1f} measured in rounds that only decode; they take "
            f"{plan['ratio']:.2f} times what is predicted for them"
        )
    if plan["plans"]:
        line += f"; planned again {plan['plans']} times, workers replaced {plan['moves']} times; {plan['last']}"
    return "; ".join([line, *list_weak_points(plan)])


def list_weak_points(plan: dict[str, Any]) -> list[str]:
    """Return which figures of the running plan do not hold, are estimates or were measured on a busy machine, and what
    is to be measured later."""
    later = plan["to_measure"]
    measured = [f"when nobody asks, {len(later)} more are measured: {', '.join(later)}"] if later else []
    return [*plan["drifted"], *plan["doubts"], *measured]
