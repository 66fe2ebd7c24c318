"""What a plan chooses from: hosts, their devices, what a model costs on each of them, and the links between hosts.

Frozen values that msgspec and `dataclasses.asdict` read and write as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from device_profiles.cost import StepCost
from device_profiles.link import LinkProfile
from device_profiles.measured import DeviceRates

Source = Literal["measured", "few layers", "split", "datasheet", "estimate"]


class Role(StrEnum):
    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine. `zone`: a failure domain and a network of its own (empty: one for all). `cores`: those that workers
    may use, numbered from 0; 0 where that is not known, and then threads are not counted. `price_per_hour`: of the
    whole machine, in currency units, paid once where any of its devices is used; 0 where not known."""

    name: str
    zone: str = ""
    cores: int = 0
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """A device that workers may be placed on.

    `profile`: the key of its options (devices of one hardware, driver and runtime share one). `memory_bytes`: free
    memory that a plan may fill; `memory_stated`: somebody said that it may not fill more, whatever is free.
    `utilisation`: the share of its time that work outside this plan takes, an exponential moving average of 0 to 1.
    `queue_depth`: a mean of the requests that wait for workers on it. Its `rates` and `power_w` (under load) are 0 or
    empty where not known. `health`: 1 where it works, less where it is suspect, 0 where nothing may be placed on it;
    `health_why`: why it is below 1.
    `price_per_hour`: what it costs beside its host, in currency units; 0 where not known, or the host's price has it.
    `names`: each runtime that sees it, with what it calls it there. `ranks`: the ids of those devices that this one
    stands for, where each layer is split over several (docs/adr/0124); no plan has it beside one of them.
    """

    id: str
    host: str
    kind: str
    profile: str
    memory_bytes: int
    utilisation: float = 0.0
    rates: DeviceRates = field(default_factory=DeviceRates)
    power_w: float = 0.0
    health: float = 1.0
    health_why: str = ""
    queue_depth: float = 0.0
    price_per_hour: float = 0.0
    memory_stated: bool = False
    names: tuple[tuple[str, str], ...] = ()
    ranks: tuple[str, ...] = ()

    def name_for(self, runtime: str) -> str:
        """Return what a runtime calls it; where that does not see it, its name here."""
        return dict(self.names).get(runtime, self.id.rpartition("/")[2])

    def list_places(self) -> list[str]:
        """Return how it is called as "HOST/DEVICE", by any of its runtimes' names."""
        return [self.id, *(f"{self.host}/{name}" for _, name in self.names)]

    def is_within(self, places: Collection[str]) -> bool:
        """Return whether all of it is among these devices and hosts."""
        return self.id in places or self.host in places or (bool(self.ranks) and set(self.ranks) <= set(places))

    def is_touched_by(self, places: Collection[str]) -> bool:
        """Return whether some of it is."""
        return not {self.id, self.host, *self.ranks}.isdisjoint(places)


@dataclass(frozen=True, slots=True)
class EndBytes:
    """What a worker takes beside its layers, in bytes: for the `first` layer (the embedding), for the `last` one (the
    output layer), and for `both`, which may share one matrix. `logits`: what the largest forward's take, beside the
    last layer."""

    first: float = 0.0
    last: float = 0.0
    both: float = 0.0
    logits: float = 0.0

    def sum_weights(self, *, first: bool, last: bool) -> float:
        """Return the weights of a worker with the first layer, the last one, both, or neither."""
        if first and last:
            return self.both
        return self.first if first else self.last if last else 0.0


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run one model on the devices of one profile, and what it costs.

    `weights`: the number format of the weights (a precision's name or "as_file"); `threads`: of the runtime on the
    host's cores, 0 where it needs none worth counting. `cost`: of the whole model; a share of its layers takes that
    share of it. `overhead_ms` and `overhead_sequence_ms`: what a forward (and each sequence in it) takes beside, as
    sampling and calling. Memory: `layer_bytes` for each layer's weights, `ends` for embedding and output layer,
    `fixed_bytes` for process and runtime, `workspace_bytes` for the largest forward without logits,
    `kv_bytes_per_token` over all layers. `min_rows`: rows that a sequence is charged for at least under exactness
    `bit`. `row_invariant`: whether a row's logits keep their bits whatever shares its batch. `prepared`: whether a
    worker loads it as it is; else it converts the model first. `bits`: the fingerprint of its numerical class, "" where
    that is not known. `taken`: the share of the device's time that other programs took while it was measured, and which
    the costs have in them. `source`: what its figures rest on; of `few layers` where the device was measured with some
    of the model's layers; `split` where they are those of one device, divided. `ranks`: over how many devices, which
    the plan takes as one, each layer is split; memory is that of all of them together.
    """

    profile: str
    role: Role
    model: str
    runtime: str
    weights: str
    cost: StepCost
    layer_bytes: float
    kv_bytes_per_token: float
    threads: int = 0
    ends: EndBytes = field(default_factory=EndBytes)
    fixed_bytes: float = 0.0
    workspace_bytes: float = 0.0
    overhead_ms: float = 0.0
    overhead_sequence_ms: float = 0.0
    load_s: float = 0.0
    row_invariant: bool = True
    min_rows: int = 1
    source: Source = "measured"
    prepared: bool = True
    bits: str = ""
    taken: float = 0.0
    ranks: int = 1

    @property
    def runs_whole(self) -> bool:
        """Whether all layers may be placed on one device by it: what was scaled from few of them tells of shards."""
        return self.source != "few layers" or self.ranks > 1

    @property
    def group(self) -> str:
        """The name of its group of equal bits: what decides them where they were not measured."""
        return self.bits or f"{self.runtime} {self.weights} on {self.profile}"

    @property
    def label(self) -> str:
        """How people name it: "openvino_rt as_file, 2 threads"."""
        threads = f", {self.threads} threads" if self.threads else ""
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.runtime} {self.weights}{threads}{ranks}"


_SAME_HOST = LinkProfile("", "", 0.25, 20e9, "assumed")  # a Unix socket, docs/adr/0017-draft-workers.md
_SAME_ZONE = LinkProfile("", "", 0.5, 1.25e9, "assumed")
_OTHER_ZONE = LinkProfile("", "", 2.0, 1.25e9, "assumed")


@dataclass(frozen=True, slots=True)
class DefaultLinks:
    """What lies between two workers where nothing was measured: 10 Gbit/s and a round trip by distance."""

    same_host: LinkProfile = _SAME_HOST
    same_zone: LinkProfile = _SAME_ZONE
    other_zone: LinkProfile = _OTHER_ZONE


@dataclass(frozen=True, slots=True)
class Inventory:
    """All there is to choose from. `links` are between host names, and count both ways."""

    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    options: tuple[Option, ...]
    links: tuple[LinkProfile, ...] = ()
    default_links: DefaultLinks = field(default_factory=DefaultLinks)
