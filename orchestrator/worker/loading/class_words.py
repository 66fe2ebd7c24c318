"""What is said of numerical classes: why one was taken, why not the others, and what it costs beside them."""

from __future__ import annotations

from device_profiles.numerical_class import ClassFinding, MeasuredClasses


def describe_choice(found: MeasuredClasses) -> str:
    """Return why a class was taken, and what it costs beside the fastest sane one, whether that keeps bits or not."""
    taken = found.finding
    if taken is None:
        return "none passed"
    words = [taken.why]
    ratio = cost_ratio(found)
    if ratio is not None:
        words.append(f"costs {ratio:.2f} times what the fastest class does")
    if taken.agreement is not None:
        words.append(f"{taken.agreement:.0%} of the choices of a float32 reference")
    return f"{'; '.join(words)}; measured {found.measured_at} in {found.took_s:.0f} s"


def cost_ratio(found: MeasuredClasses) -> float | None:
    """Return what the chosen class costs beside the fastest that was measured; None where none was."""
    costs = [one.mixed_ms for one in found.findings if one.mixed_ms]
    taken = found.finding
    return None if taken is None or not taken.mixed_ms else taken.mixed_ms / min(costs)


def describe_rejected(found: MeasuredClasses) -> list[str]:
    """Return each class that was not taken, and why."""
    return [f"{one.numerical_class}: {_why_not(one, found)}" for one in found.rejected]


def _why_not(one: ClassFinding, found: MeasuredClasses) -> str:
    taken = found.finding
    if not one.passed or taken is None:
        return one.why
    return (
        f"{one.mixed_ms / taken.mixed_ms:.2f} times the cost"
        + ", and fewer devices share it" * (found.findings.index(one) > found.chosen)
        if taken.mixed_ms
        else one.why
    )
