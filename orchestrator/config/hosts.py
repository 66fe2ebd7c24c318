"""The sections `hosts` and `links`: the machines of a cluster, in cluster.yaml and in sketches of clusters alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import Field

from orchestrator.config.section import Price, Section, Size
from orchestrator.config.source_text import Place, SourceFile

HEAD_PORT: Final = 6379
"""Of Ray's head, where none is named: Ray's own."""
Name = Annotated[str, Field(min_length=1, max_length=128)]
RoleName = Literal["target", "draft"]


def add_head_port(address: str) -> str:
    """Return HOST:PORT of a head, of which HOST alone may be given. An IPv6 address stands in brackets."""
    host, colon, port = address.rpartition(":")
    return address if host and colon and port.isdecimal() else f"{address}:{HEAD_PORT}"


class HostDevice(Section):
    """Devices of one kind on a host."""

    device: Name
    """Of a host that is there: the device as its runtime names it (`CPU`, `CUDA:0`, `SYCL0`). Of one that is not: a
    device of the shipped library (`outrider plan --library` lists them), or of a stored profile. In any case."""
    count: int = Field(default=1, ge=1, le=1024)
    """How many of them a host has that is not there."""
    memory: Size | None = None
    """What a plan may fill of each. Left out: what is free; of a host that is not there what the library says, and
    of its CPUs and NPUs the host's `memory`."""
    price_per_hour: Price = 0.0
    """What each costs an hour beside its host, in units of `placement.currency`; 0: not known, or in the host's."""


class ClusterHost(Section):
    """A machine that is there, or several alike that are not."""

    name: Name
    """Its name, as `placement` and `links` use it; of several that are not there `NAME-1`, `NAME-2` and so on."""
    address: str = Field(default="", max_length=255)
    """The address of its Ray node, or `here` for the daemon's own host. Empty: it is not there, for `outrider plan
    --cluster`."""
    count: int = Field(default=1, ge=1, le=10_000)
    """How many there are that are not there."""
    zone: str = ""
    """Its failure domain, with a network of its own."""
    roles: tuple[RoleName, ...] = Field(default=("target", "draft"), min_length=1, max_length=2, strict=False)
    """What its devices may host."""
    cores: int = Field(default=0, ge=0, le=4096)
    """Cores that workers may use; 0: all that it has."""
    memory: Size | None = None
    """Main memory of a host that is not there, which its CPUs and NPUs work in."""
    price_per_hour: Price = 0.0
    """What each costs an hour, paid once where any of its devices is used. 0: not known, or in its devices'; of the
    daemon's own host `devices.price_per_hour`."""
    devices: tuple[HostDevice, ...] = Field(default=(), max_length=64, strict=False)
    """The devices that may be used. Empty: all that its runtimes find. One that is not there has to list them."""

    @property
    def stated_bytes(self) -> dict[str, int]:
        """What a plan may fill of its devices, by name, where that is stated."""
        return {device.device: int(device.memory) for device in self.devices if device.memory is not None}


class ClusterLink(Section):
    """What lies between two workers."""

    rtt_ms: float = Field(ge=0, le=60_000)
    """A small message there and back."""
    gbit_per_s: float = Field(gt=0, le=1_000_000)
    """The rate of a large transfer."""


class ClusterLinkBetween(ClusterLink):
    """What lies between two hosts."""

    hosts: tuple[Name, Name] = Field(strict=False)
    """The two hosts."""


class ClusterLinks(Section):
    """Links by class, and those that differ from their class. What is stated here is not measured."""

    same_host: ClusterLink | None = None
    """Between two workers on a host."""
    same_zone: ClusterLink | None = None
    """Between hosts of a zone."""
    other_zone: ClusterLink | None = None
    """Between hosts of different zones."""
    between: tuple[ClusterLinkBetween, ...] = Field(default=(), max_length=10_000, strict=False)
    """Between named hosts."""


def host_names(host: ClusterHost) -> list[str]:
    """Return the names of the machines that an entry stands for."""
    return [host.name] if host.count == 1 else [f"{host.name}-{number}" for number in range(1, host.count + 1)]


def check_hosts(hosts: Sequence[ClusterHost], links: ClusterLinks, file: SourceFile) -> None:
    """Refuse names that stand twice, and links between hosts that are none. Raises ConfigError."""
    names = [host.name for host in hosts]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise file.refuse(("hosts", index, "name"), f"{name!r} is there twice; use `count`")
    known = {name for host in hosts for name in host_names(host)}
    for index, link in enumerate(links.between):
        for name in link.hosts:
            if name not in known:
                raise file.refuse(("links", "between", index, "hosts"), f"there is no host {name!r}")


def check_sketched_hosts(hosts: Sequence[ClusterHost], file: SourceFile) -> None:
    """Refuse hosts of a sketch of which a plan would not know enough. Raises ConfigError."""
    for index, host in enumerate(hosts):
        for key in ("memory", "devices"):
            if not getattr(host, key):
                raise file.refuse(("hosts", index, key), "is missing: of a host that is not there it has to be stated")


def check_running_hosts(hosts: Sequence[ClusterHost], file: SourceFile) -> None:
    """Refuse hosts that a daemon cannot find, and what would change nothing for it. Raises ConfigError."""
    addresses = [host.address for host in hosts]
    for index, host in enumerate(hosts):
        place: Place = ("hosts", index)
        if not host.address:
            why = "is missing: `serve` needs it (`outrider plan --cluster` plans for hosts that are not there)"
            raise file.refuse((*place, "address"), why)
        if host.address in addresses[:index]:
            raise file.refuse((*place, "address"), f"{host.address} is there twice")
        for key in ("count", "memory"):
            if key in host.model_fields_set:
                raise file.refuse((*place, key), "is for hosts that are not there; leave it out")
        for at, device in enumerate(host.devices):
            if "count" in device.model_fields_set:
                why = "is for hosts that are not there; name each device"
                raise file.refuse((*place, "devices", at, "count"), why)
