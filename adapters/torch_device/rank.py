"""A rank of tensor parallelism other than rank 0: `python -m adapters.torch_device.rank --fd N`, a process of its own.

It holds its part of the weights and of the KV cache, and does what rank 0 sends. It ends with rank 0's process, and
when rank 0 closes the socket, whatever it is at.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress

from adapters.contract import AdapterError
from adapters.parent_process import end_with_parent
from adapters.torch_device.rank_link import Call, Link, RankFailed, RankJob


def serve_rank(link: Link) -> None:
    """Load what rank 0 names, and do what it sends. Returns only by an exception."""
    from adapters.torch_device.adapter import import_torch

    job: RankJob = link.receive()
    torch = import_torch()
    from adapters.torch_device.parts import load_part
    from adapters.torch_device.rank_group import RankGroup

    device = torch.device(job.place.device.lower())
    group = RankGroup(job.rank, job.options.tensor_parallel)
    part = load_part(job.prepared, job.options, job.numerical_class, job.layers, job.blocks, job.place, group)
    link.send(part.memory.list_page_bytes()[0])
    while True:
        call: Call = link.receive()
        match call.operation:
            case "connect":
                group.connect(job.meeting, device, job.patience_s)
                link.send(None)
            case "run":
                part.runner.run(*call.arguments)
            case "read_blocks":
                link.send(part.memory.read_blocks(*call.arguments).numpy())
            case "write_blocks":
                cache, blocks, pages = call.arguments
                part.memory.write_blocks(cache, blocks, torch.from_numpy(pages))
            case "copy" | "erase":
                getattr(part.memory, call.operation)(*call.arguments)


def _end_with_link(own: socket.socket) -> None:
    """End this process when rank 0 closes its end: it may wait for another rank, or hang in native code, just then."""

    def watch() -> None:
        poll = select.poll()
        poll.register(own, select.POLLRDHUP if hasattr(select, "POLLRDHUP") else select.POLLHUP)
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, name="link", daemon=True).start()


def main() -> int:
    """Serve until rank 0 is gone; 1 after a failure, which rank 0 is told."""
    parser = argparse.ArgumentParser(prog="python -m adapters.torch_device.rank", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="an inherited socket to rank 0")
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = socket.socket(fileno=parser.parse_args().fd)
    link = Link(own)
    _end_with_link(own)
    try:
        serve_rank(link)
    except AdapterError as error:
        failure = error
    except (RuntimeError, MemoryError) as error:
        from adapters.torch_device.failures import classify_torch_failure

        failure = classify_torch_failure(error)
    except OSError:
        return 0  # rank 0 is gone
    from adapters.torch_device.rank_group import GroupBroken

    with suppress(OSError):
        link.send(RankFailed(failure))
        if isinstance(failure, GroupBroken):
            signal.pause()  # another rank has failed: rank 0 is to find that one, and not this
    return 1


if __name__ == "__main__":
    sys.exit(main())
