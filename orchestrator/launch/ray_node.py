"""A Ray node of this host, as `ray start --block` makes it, that ends where its head no longer knows it.

It is a process of its own, as Ray's native code may end it (docs/adr/0048-ray-in-a-process-of-its-own.md). Ray itself
leaves such a node standing: it waits for the head of its own cluster, whatever answers at that head's address since.
`node_keeper` starts it, hears its reports, and starts the next. Run as `python -m orchestrator.launch.ray_node`.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import secrets
import signal
import sys
import threading
import time
from typing import Any

from adapters.parent_process import end_with_parent
from orchestrator.launch.node_reports import CARD_KEY, NodeReport, describe_skew, encode_report
from orchestrator.launch.ray_settings import NAMESPACE, WAY_OUT

# ADR 0146: as often as the driver asks the head.
_LOOK_EVERY_S = 1.0
# ADR 0146: as long as the driver waits.
_ANSWER_TIMEOUT_S = 2.0
# ADR 0146: what this host ran is lost to the daemon after 4 s, and Ray's connections may stand still for a minute more.
_CUT_OFF_S = 10.0
# A node that the head never lists. Ray's own start takes 4 s on two cores. Not tuned.
_LISTED_WITHIN_S = 60.0
_MARK = "outrider-node"  # the label that tells this node from those before it on this host
_NODE_MEMORY_BYTES = 80 * 1024 * 1024  # of Ray's object store: our frames are small, and Ray's least is 75 MiB


class Reporter:
    """The pipe to the keeper. A keeper that is gone ends this process by itself."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, report: NodeReport) -> None:
        """Write a report, whole."""
        os.write(self._descriptor, encode_report(report))


class HeadWatch:
    """Asks the head whether it knows the node with a mark."""

    def __init__(self, address: str, mark: str) -> None:
        self._address = address
        self._mark = mark
        self._client: Any = None

    def find_node(self) -> bool | None:
        """Return whether the head lists the node as alive; None where it does not answer. A client that got no answer
        is not used again: its connection may stand still long after the way is free."""
        try:
            self._client = self._client or _connect(self._address)
            nodes = self._client.get_all_node_info(timeout=_ANSWER_TIMEOUT_S).values()
        except Exception:  # Ray's errors, its native ones among them
            self._client = None
            return None
        return any(node.state == node.ALIVE and node.labels.get(_MARK) == self._mark for node in nodes)


def watch(head: HeadWatch, reporter: Reporter) -> None:
    """Report when the node is in the cluster, and end this process when it is of no use there any more."""
    began_s, silent_since_s, is_listed = time.monotonic(), None, False
    while True:
        time.sleep(_LOOK_EVERY_S)
        now_s, answer = time.monotonic(), head.find_node()
        if answer is None:
            silent_since_s = now_s if silent_since_s is None else silent_since_s
            continue
        silent_s = 0.0 if silent_since_s is None else now_s - silent_since_s
        silent_since_s = None
        if is_listed and not answer:
            return _leave(reporter, "the head at this address does not know this node any more")
        if is_listed and silent_s >= _CUT_OFF_S:
            return _leave(reporter, f"the head had not answered for {silent_s:.0f} s")
        if not is_listed and answer:
            is_listed = True
            reporter.send(NodeReport("joined"))
        if not is_listed and now_s - began_s > _LISTED_WITHIN_S:
            return _leave(reporter, f"the head has not listed this node within {_LISTED_WITHIN_S:g} s")


def _leave(reporter: Reporter, why: str) -> None:
    reporter.send(NodeReport("left", why))
    os.kill(os.getpid(), signal.SIGTERM)  # Ray's handler of it ends all that it started


def _connect(address: str) -> Any:
    """Return a client of the head's. Raises Ray's errors."""
    return importlib.import_module("ray._raylet").GcsClient(address=address)


def _has_head_node(client: Any) -> bool:
    """Return whether the head's own node is there: without it `ray start` fails, after seconds."""
    nodes = client.get_all_node_info(timeout=_ANSWER_TIMEOUT_S).values()
    return any(node.is_head_node and node.state == node.ALIVE for node in nodes)


def check_head(address: str) -> str:
    """Return why this host must not join the head at an address, "" where it may. Waits for a head that has just begun
    to listen. Raises what Ray does where it does not answer."""
    import ray

    try:
        client = _connect(address)
        deadline_s = time.monotonic() + _LISTED_WITHIN_S
        while not _has_head_node(client) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S)
        written = client.internal_kv_get(CARD_KEY, NAMESPACE.encode(), timeout=_ANSWER_TIMEOUT_S)
    except ray.exceptions.AuthenticationError:
        return "the token is not that of the front: it stands in ~/.ray/auth_token there, or in its RAY_AUTH_TOKEN"
    return describe_skew(written, ray.__version__) if written else ""


def list_arguments(address: str, own_address: str, directory: str, mark: str, *, is_head: bool) -> list[str]:
    """Return what `ray start` is called with."""
    where = f"--address={address}"
    head = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
    return [
        *("--block", f"--node-ip-address={own_address}", f"--temp-dir={directory}", f"--labels={_MARK}={mark}"),
        *(f"--object-store-memory={_NODE_MEMORY_BYTES}", "--log-color=false"),
        *(head if is_head else [where]),
    ]


def main() -> int:
    """Be a node until it is of no use; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.launch.ray_node", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="an inherited pipe to whoever keeps the node")
    parser.add_argument("--address", required=True, help="HOST:PORT of the head")
    parser.add_argument("--own-address", required=True)
    parser.add_argument("--directory", required=True, help="of Ray's sockets and logs")
    parser.add_argument("--head", action="store_true", help="be the head")
    given = parser.parse_args()
    faulthandler.enable()
    end_with_parent()
    reporter = Reporter(given.fd)
    try:
        from ray.scripts.scripts import start
    except ImportError as error:
        reporter.send(NodeReport("refused", f"{error}: {WAY_OUT}"))
        return 1
    if not given.head and (why := check_head(given.address)):
        reporter.send(NodeReport("refused", why))
        return 1
    mark = secrets.token_hex(8)
    threading.Thread(target=watch, args=(HeadWatch(given.address, mark), reporter), name="watch", daemon=True).start()
    arguments = list_arguments(given.address, given.own_address, given.directory, mark, is_head=given.head)
    start.main(args=arguments, prog_name="ray start", standalone_mode=False)  # Ray's processes die with this thread
    return 0


if __name__ == "__main__":
    sys.exit(main())
