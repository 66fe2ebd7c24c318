"""What is said of numerical classes: why one was taken, why not the others, and what it costs beside them."""

from __future__ import annotations

from device_profiles.numerical_class import ClassFinding, MeasuredClasses


def describe_choice(measured: MeasuredClasses) -> str:
    """Return why a class was taken, and what it costs beside the fastest sane one, whether that keeps bits or not."""
    taken = measured.finding
    if taken is None:
        return "none passed"
    words = [taken.why]
    ratio = cost_ratio(measured)
    if ratio is not None:
        words.append(f"costs {ratio:.2f} times what the fastest class does")
    if taken.agreement is not None:
        words.append(f"{taken.agreement:.0%} of the choices of a float32 reference")
    return f"{'; '.join(words)}; measured {measured.measured_at} in {measured.took_s:.0f} s"


def cost_ratio(measured: MeasuredClasses) -> float | None:
    """Return what the chosen class costs beside the fastest that was measured; None where none was."""
    costs = [finding.mixed_ms for finding in measured.findings if finding.mixed_ms]
    taken = measured.finding
    return None if taken is None or not taken.mixed_ms else taken.mixed_ms / min(costs)


def describe_rejected(measured: MeasuredClasses) -> list[str]:
    return [f"{finding.numerical_class}: {_why_not(finding, measured)}" for finding in measured.rejected]


def _why_not(finding: ClassFinding, measured: MeasuredClasses) -> str:
    taken = measured.finding
    if not finding.passed or taken is None:
        return finding.why
    return (
        f"{finding.mixed_ms / taken.mixed_ms:.2f} times the cost"
        + ", and fewer devices share it" * (measured.findings.index(finding) > measured.chosen)
        if taken.mixed_ms
        else finding.why
    )
