"""What lies between two workers."""

from __future__ import annotations

from dataclasses import dataclass

from device_profiles.units import MS_PER_S


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A path between two hosts, in both directions alike. `rtt_ms`: a small message there and back, median.
    `bytes_per_s`: of a large transfer. `source`: "measured", "datasheet" or "assumed"."""

    left: str
    right: str
    rtt_ms: float
    bytes_per_s: float
    source: str = "measured"

    def transfer_ms(self, size_bytes: float) -> float:
        """Return the time for a message of this size one way."""
        return self.rtt_ms / 2 + size_bytes / self.bytes_per_s * MS_PER_S


SAME_HOST = LinkProfile("", "", 0.0, float("inf"), "assumed")
"""Two roles in one process: nothing lies between them."""
