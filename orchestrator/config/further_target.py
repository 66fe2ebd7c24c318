"""The section `models`: further targets behind the endpoint, each with its own drafts, limits and objectives."""

from __future__ import annotations

from pydantic import Field

from orchestrator.config.drafts import Draft, SuffixDraft
from orchestrator.config.failover import FailoverSection
from orchestrator.config.model_keys import Cores
from orchestrator.config.placement import PlacementSection
from orchestrator.config.routing import SloSection
from orchestrator.config.section import Size
from orchestrator.config.source_text import Place
from orchestrator.config.speculation import Speculation
from orchestrator.config.target import Target

_LIMITS = ("kv_cache", "max_running", "max_waiting", "max_batch_rows", "max_itl_ms")
_DEVICES = ("cores", "threads")
_SECTIONS = ("speculation", "slo", "placement", "failover")
OWN_KEYS: dict[str, tuple[str, ...]] = {
    "drafts": (),
    "devices": _DEVICES,
    "limits": _LIMITS,
    **dict.fromkeys(_SECTIONS, ()),
}
"""Beside `model`: the sections of which a further target has its own, and which keys of them; () for all."""


def find_first_place(key: str) -> str:
    """Return where a key of a further target stands for the first one, which has sections of their own for what is not
    in `model`; "" where it has no such key."""
    if key in OWN_KEYS:
        return key
    return next((f"{section}.{key}" for section, keys in OWN_KEYS.items() if key in keys), "")


class FurtherTarget(Target):
    """A further target model. Beside what stands here it has all keys of `model`, with the same meaning."""

    name: str = Field(min_length=1, max_length=128)
    """The model's name in the API. Requests choose it by that, and no other has it."""
    drafts: tuple[Draft, ...] | None = Field(default=None, max_length=4, strict=False)
    """Its drafters, written as `drafts`. Left out: a suffix drafter."""
    speculation: Speculation | None = None
    """How speculation runs for it, written as `speculation`. Left out: as there."""
    slo: SloSection | None = None
    """Its objectives, written as `slo`. Left out: as there."""
    placement: PlacementSection | None = None
    """What its plan is for, written as `placement`; where something of it is `auto`. Left out: as there."""
    failover: FailoverSection | None = None
    """What takes its place when it is lost, written as `failover`. Left out: as there, without the standbys."""
    cores: Cores = Field(default=[])
    """The CPU cores that its worker runs on, by their numbers on its host. Empty: all."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of its runtime; 0 is one for each of its `cores`, and `devices.threads` where it has none."""
    kv_cache: Size | None = None
    """Memory of its KV cache, of each replica. Left out: as `limits.kv_cache`."""
    max_running: int | None = Field(default=None, ge=1, le=1024)
    """Sequences that each replica of it decodes at the same time. Left out: as `limits.max_running`."""
    max_waiting: int | None = Field(default=None, ge=0, le=100_000)
    """Its requests that may wait for a place. Left out: as `limits.max_waiting`."""
    max_batch_rows: int | None = Field(default=None, ge=16, le=8192)
    """Rows of one forward of it. Left out: as `limits.max_batch_rows`."""
    max_itl_ms: float | None = Field(default=None, ge=1, le=60_000)
    """The longest forward of it that decodes and prefills. Left out: as `limits.max_itl_ms`."""

    @property
    def target(self) -> Target:
        """Return the keys that `model` has, too."""
        own = {name: getattr(self, name) for name in Target.model_fields}
        return Target.model_construct(self.model_fields_set & own.keys(), **own)

    @property
    def drafters(self) -> tuple[Draft, ...]:
        """Return its drafts."""
        return (SuffixDraft(method="suffix"),) if self.drafts is None else self.drafts

    @property
    def own_limits(self) -> dict[str, object]:
        """Return those of `limits` that are its own."""
        return {name: value for name in _LIMITS if (value := getattr(self, name)) is not None}

    def find_own(self, *place: str | int) -> Place:
        """Return where in this section a value stands that is at `place` in its target's configuration; () where the
        value is everybody's."""
        section, rest = place[0], place[1:]
        if section == "drafts":
            return place
        if section == "model":
            return rest
        if section in _SECTIONS:
            return place if getattr(self, str(section)) is not None else ()
        own = {"limits": tuple(self.own_limits), "devices": _DEVICES}.get(str(section), ())
        return rest if rest and rest[0] in own else ()
