"""What a Ray node's process tells its keeper: a line of JSON each. And the card by which hosts of a cluster are told
whether they fit together, which the daemon leaves with the cluster's head."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Final, Literal

import msgspec

CARD_KEY: Final = b"outrider"


class NodeReport(msgspec.Struct, frozen=True):
    """`joined`: the head lists the node. `left`: it is of no use any more, and ends. `refused`: this host can never be
    a node of that cluster as it is. `why`: of the last two, in one line."""

    state: Literal["joined", "left", "refused"]
    why: str = ""


class ClusterCard(msgspec.Struct, frozen=True):
    """The versions of the daemon's host."""

    outrider: str
    python: str
    ray: str


_encoder = msgspec.json.Encoder()
_reports: msgspec.json.Decoder[NodeReport] = msgspec.json.Decoder(NodeReport)
_cards: msgspec.json.Decoder[ClusterCard] = msgspec.json.Decoder(ClusterCard)


def encode_report(report: NodeReport) -> bytes:
    """Return a report as a line."""
    return _encoder.encode(report) + b"\n"


def decode_report(line: bytes) -> NodeReport:
    """Return the report in a line. Raises msgspec.DecodeError."""
    return _reports.decode(line)


def write_card(ray: str) -> bytes:
    """Return this host's card. `ray`: the version of Ray here."""
    return _encoder.encode(ClusterCard(version("outrider"), platform.python_version(), ray))


def describe_skew(card: bytes, ray: str) -> str:
    """Return why this host, with Ray of version `ray`, cannot work for the one whose card it is; "" where it can."""
    try:
        theirs = _cards.decode(card)
    except msgspec.DecodeError:
        return "the front is of another version of Outrider: install the same on both"
    own = ClusterCard(version("outrider"), platform.python_version(), ray)
    if theirs.outrider != own.outrider:
        return f"this host has Outrider {own.outrider}, and the front {theirs.outrider}: install the same on both"
    if theirs.python.split(".")[:2] != own.python.split(".")[:2]:
        return f"this host has Python {own.python}, and the front {theirs.python}: Ray needs the same minor version"
    if theirs.ray != own.ray:
        return f"this host has Ray {own.ray}, and the front {theirs.ray}: install the same on both"
    return ""
