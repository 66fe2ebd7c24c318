"""The cluster.yaml that `outrider init` writes: what was chosen, and why in comments."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any, Final

import yaml

from adapters.names import CONVERTING_ADAPTERS
from device_profiles.units import human_bytes
from orchestrator.config.target import AUTO
from orchestrator.setup.proposal import Candidate, describe_memory, describe_speed
from orchestrator.setup.servers import LocalServer, ServedModel

_WIDTH: Final = 118  # of a comment, with its sign. Not tuned.


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to be served. `draft`: None for none; `members`: servers that serve the target's files already.
    `instead_of`: the server whose port is taken, None for none. `cluster`: the address of the Ray cluster whose hosts
    are to serve, "" for this machine alone. `draft_server`: who drafts in place of `draft`, None for nobody.
    `is_front`: this machine keeps it."""

    target: Candidate
    draft: Candidate | None = None
    members: tuple[tuple[LocalServer, ServedModel], ...] = ()
    instead_of: LocalServer | None = None
    cluster: str = ""
    draft_server: LocalServer | None = None
    is_front: bool = False


def write_text(choice: Choice, host: str, written_on: str) -> str:
    """Return the text of a cluster.yaml. `host`: what this machine is, in words."""
    head = _comment(
        f"Written by `outrider init` on {written_on}, for this machine: {host}.",
        "A key that is not here has its default: docs/configuration.md and `outrider config show` have all.",
    )
    parts = [head, _write_model(choice)]
    target = choice.target
    if choice.draft_server is not None:
        parts.append(_write_draft_server(choice.draft_server))
    elif choice.draft is not None:
        parts.append(_write_drafts(choice.draft, _read_runtime(choice)))
    if limits := (target.sections or {}).get("limits"):
        why = "A KV cache of the default, 1 GiB, does not fit beside the weights."
        parts.append(_comment(why) + _dump({"limits": limits}))
    if choice.instead_of is not None:
        why = f"The port of {choice.instead_of.title}, which is to be stopped first: clients stay as they are."
        parts.append(_comment(why) + _dump({"api": {"port": choice.instead_of.port}}))
    if choice.is_front:
        why = f"Hosts come to it by `outrider join {choice.cluster}` (docs/two-hosts.md)."
        parts.append(_comment(why) + _dump({"cluster": {"address": choice.cluster, "head": True}}))
    elif choice.cluster:
        why = "Workers run on the hosts of this Ray cluster, too. RAY_AUTH_TOKEN has its token (docs/two-hosts.md)."
        parts.append(_comment(why) + _dump({"cluster": {"address": choice.cluster}}))
    return "\n".join(parts)


def _write_model(choice: Choice) -> str:
    target = choice.target
    model = dict((target.sections or {})["model"])
    if target.model.path.name not in target.model.name:  # it is called by a digest, which is no name
        model = {"source": model.pop("source"), "name": target.model.name, **model}
    lines = [_describe_model(target), f"Predicted: {describe_speed(target)}; {'; '.join(describe_memory(target))}."]
    if choice.members:
        model = {"source": model["source"], "adapter": target.runtime, "device": target.device}
        model["replicas"] = [{}, *(_write_member(server, served) for server, served in choice.members)]
        titles = ", ".join(f"{server.title} at {server.url}" for server, _ in choice.members)
        lines.append(f"Replicas: a worker of Outrider, and {titles}, which has the same files.")
    elif model.get("adapter") == AUTO:
        if choice.is_front:
            model["replicas"] = AUTO
            lines.append("Replicas: as many as are worth it, on the hosts that are there.")
        lines.append("`auto`: the plan chooses runtime and device, and measures the others while nobody asks.")
    if target.runtime in CONVERTING_ADAPTERS:
        lines.append(f"The first start converts it, into the store: about {human_bytes(target.weights_bytes)}.")
    return _comment(*lines) + _dump({"model": model})


def _write_member(server: LocalServer, served: ServedModel) -> dict[str, str]:
    named = {"model": served.name} if len(server.models) > 1 else {}
    return {"endpoint": server.url, **named, **_write_key(server)}


def _write_key(server: LocalServer) -> dict[str, str]:
    return {"api_key_file": server.key_file} if server.key_file else {}


def _write_draft_server(server: LocalServer) -> str:
    why = _comment(
        f"What proposes tokens: first the text's own repetitions, then {server.title} at {server.url}, whose model has "
        "the target's vocabulary. It may come and go, and is left alone while it does not pay."
    )
    drafts = [{"method": "suffix"}, {"method": "model", "endpoint": server.url, **_write_key(server)}]
    return why + _dump({"drafts": drafts})


def _write_drafts(draft: Candidate, runtime: dict[str, Any]) -> str:
    size = human_bytes(draft.weights_bytes)
    why = _comment(
        "What proposes tokens: first the text's own repetitions, then a model with the target's vocabulary "
        f"({draft.model.name}, {size}). It is left alone while that does not pay."
    )
    return why + _dump({"drafts": [{"method": "suffix"}, {"method": "model", "source": draft.model.source, **runtime}]})


def _read_runtime(choice: Choice) -> dict[str, Any]:
    """Return the keys of a draft's runtime: the plan's where it chooses, else the target's."""
    if choice.members:
        return {"adapter": choice.target.runtime, "device": choice.target.device}
    model = (choice.target.sections or {})["model"]
    return {key: model[key] for key in ("adapter", "device") if key in model}


def _describe_model(target: Candidate) -> str:
    check = target.check
    facts = [human_bytes(target.weights_bytes), f"from {target.model.place}"]
    if check is not None:
        facts = [check.format, *facts]
    return f"{target.model.name}: {', '.join(facts)}."


def _comment(*lines: str) -> str:
    wrapped = (part for line in lines for part in textwrap.wrap(line, _WIDTH - 2, break_long_words=False))
    return "".join(f"# {line}\n" for line in wrapped)


def _dump(section: dict[str, Any]) -> str:
    return yaml.safe_dump(section, sort_keys=False, allow_unicode=True, width=_WIDTH)
