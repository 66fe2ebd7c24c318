"""What a person at a terminal is told when the daemon serves. Programs read the log instead."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TextIO

from orchestrator.config.model import ClusterConfig
from orchestrator.protocol.ready import Ready, ReadyDrafting

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104  # one cannot connect to these


def describe_ray_start(config: ClusterConfig) -> str:
    if not config.cluster.on_ray:
        return ""
    address = config.cluster.address
    return f"join Ray at {address}" if address else "start Ray on this machine: some seconds"


def is_for_people(config: ClusterConfig, out: TextIO) -> bool:
    """Return whether somebody reads what is written there, and no program."""
    return out.isatty() and config.logging.format != "json"


def show_banner(config: ClusterConfig, ready: Ready, url: str, out: TextIO | None = None) -> None:
    """Write the banner to a terminal; nothing where there is none, or the log is to be JSON."""
    out = out or sys.stderr
    if is_for_people(config, out):
        out.write(build_banner(ready, url, keys=bool(config.api.keys_file)))
        out.flush()


def build_banner(ready: Ready, url: str, *, keys: bool) -> str:
    """Return where the model is, how it runs, and a first request. `keys`: one is asked for."""
    device = ready.device
    rows = (
        ("URL", url),
        ("model", ready.model.name),
        ("device", f"{device.adapter} {device.name}: {device.full_name}; activations {ready.precision.activations}"),
        ("drafts", describe_drafting(ready.drafting)),
        ("try", _build_request(ready, url, keys=keys)),
        ("more", "outrider status; Ctrl-C finishes running streams and ends"),
    )
    return "\n".join(["", *(f"  {name:<7}{text}" for name, text in rows), "", ""])


def describe_drafting(drafting: ReadyDrafting) -> str:
    if not drafting.drafters or not drafting.max_depth:
        why = drafting.no_drafts or "every token is the target's own"
        return f"none: {why}"
    who = ", then ".join(drafting.drafters)
    if drafting.fixed_depth:
        return f"{who}; up to {drafting.max_depth} tokens in every round, as many as it proposes"
    return f"{who}; {drafting.starting_depth:g} tokens at first, then as many as pay, up to {drafting.max_depth}"


def _build_request(ready: Ready, url: str, *, keys: bool) -> str:
    for any_address, own_address in _ANY_ADDRESS.items():
        url = url.replace(f"//{any_address}:", f"//{own_address}:")
    messages = [{"role": "user", "content": "Why do ships float?"}]
    body = {"model": ready.model.name, "messages": messages, "max_tokens": 100}
    head = "-H 'Content-Type: application/json'"
    key = ' -H "Authorization: Bearer $KEY"' if keys else ""
    return f"curl {url}/chat/completions {head}{key} -d {shlex.quote(json.dumps(body))}"
