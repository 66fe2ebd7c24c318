"""`outrider plan`: where target and drafts would run, at which depth and speed, and why nothing else was chosen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import ModelName, print_json

if TYPE_CHECKING:  # loaded where a plan is made
    from orchestrator.config.model import ClusterConfig
    from orchestrator.planning.neighbours import TakenPlace
    from orchestrator.planning.proposal import PlanProposal
    from policies.planning.plan import Plan

app = typer.Typer(help="Plan where target and drafts run, without loading anything.")

RUNNING, PROPOSED = "running", "proposed"

Config = Annotated[Path | None, typer.Option(help="The cluster.yaml to plan for.")]
Cluster = Annotated[
    Path | None,
    typer.Option("--cluster", help="A cluster that is not there: a sketch, or a cluster.yaml (docs/planning.md)."),
]
Profiles = Annotated[Path | None, typer.Option("--profiles", help="A directory of stored profiles.")]


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why the alternatives were not chosen, and what is assumed.")
    ] = (False),
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan for programs; `plan diff` reads it.")] = False,
    library: Annotated[bool, typer.Option("--library", help="List the devices that a sketch may name.")] = False,
    model: ModelName = None,
    config: Config = None,
    cluster: Cluster = None,
    profiles: Profiles = None,
) -> None:
    """Say which device, runtime and precision would host the target, where drafts come from, and how fast it is."""
    if context.invoked_subcommand is not None:
        return
    from orchestrator.cli.plan_table import print_library, print_proposal
    from orchestrator.cli.status_lines import list_weak_points

    if library:
        print_library()
        return
    proposals = propose_plans(config, cluster, profiles, model)
    if as_json:
        from orchestrator.planning.basis import plain

        first, *further = map(plain, proposals.values())
        print_json({**first, "models": further} if further else first)
        return
    several = len(proposals) > 1
    for name, proposal in proposals.items():
        here = cluster is None and profiles is None
        running = _find_running(config, name if several else model) if here else None
        weak_points = list_weak_points(running) if running is not None else []
        print_proposal(proposal, weak_points, explain=explain, model=name if several else "")
        if explain and running is not None:
            _print_learnt(proposal, running)


def _print_learnt(proposal: PlanProposal, running: Mapping[str, Any]) -> None:
    """Print what a running daemon has learnt beyond the plan: replicas that are out, runtimes that refused."""
    out = [wanted["why"] for wanted in (*running["missing"], *running["unmet"])]
    for line in (*out, *running["assumed"]):
        if line not in proposal.assumed:
            typer.echo(f"the daemon that runs says: {line}")


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="A file of `plan --json`, `running` or `proposed`.")] = RUNNING,
    after: Annotated[str, typer.Argument(help="As the first.")] = PROPOSED,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences for programs.")] = False,
    model: ModelName = None,
    config: Config = None,
    cluster: Cluster = None,
    profiles: Profiles = None,
) -> None:
    """Say what is different between two plans: by default between what runs of the daemon's and what would be planned
    now."""
    from dataclasses import asdict

    from orchestrator.cli.plan_table import print_diff
    from policies.planning.plan import diff as differences

    (old, running), (new, _) = (_load_plan(name, config, cluster, profiles, model) for name in (before, after))
    missing, unmet = running.get("missing", []), running.get("unmet", [])
    changes = differences(old, new, [replica["replica"] for replica in missing])
    if as_json:
        gain = changes.gain if changes.before_tokens_per_s else None
        print_json({**asdict(changes), "gain": gain, "missing": missing, "unmet": unmet})
    else:
        print_diff(changes, before, after, new.currency)
        for replica in missing:
            print(f"replica {replica['replica']} is planned and does not run: {replica['why']}")
        for wish in unmet:
            print(wish["why"])


def propose_plans(
    config: Path | None,
    cluster: Path | None,
    profiles: Path | None,
    model: str | None = None,
    *,
    first: bool = False,
) -> dict[str, PlanProposal]:
    """Return what is planned for each model by its name, or for the one that is named, or the `first`. Each is planned
    beside those before it. Raises OutriderError or AdapterError."""
    from orchestrator.config.sketch import is_cluster_file, load_sketch
    from orchestrator.daemon.bootstrap.plan_board import PlanBoard
    from orchestrator.planning.wanted import PlanError

    if cluster is not None and load_sketch(cluster).target is not None:
        return {"": _propose_sketch(config, cluster, profiles, None)}
    if config is None and cluster is not None and is_cluster_file(cluster):  # the sketch itself says what is placed
        config = cluster
    loaded, base = _load(config, present=cluster is None)
    names = [target.model.name for target in loaded.targets]
    if model is not None and model not in names:
        known = " and ".join(map(repr, names))
        raise PlanError(f"there is no model '{model}' in this configuration; there is {known}")
    board = PlanBoard(loaded.targets, base)
    proposals: dict[str, PlanProposal] = {}
    for number, target in enumerate(loaded.targets[:1] if first else loaded.targets):
        taken = board.list_taken(number)
        if cluster is not None:
            proposal = _propose_sketch(config, cluster, profiles, (target, base, taken))
        else:
            proposal = _propose_target(target, config, base, profiles, taken)
        if target.planned:
            board.note(number, _return(proposal.plan))
        proposals[target.model.name] = proposal
        if model == target.model.name:
            return {model: proposal}
    return proposals


def _return(plan: Plan) -> Callable[[], Plan]:
    return lambda: plan


def _propose_sketch(
    config: Path | None,
    cluster: Path,
    profiles: Path | None,
    placed: tuple[ClusterConfig, Path, tuple[TakenPlace, ...]] | None,
) -> PlanProposal:
    """Return the plan for a cluster that is not there. `placed`: a target, and what others have (None: its own)."""
    from dataclasses import replace

    from device_profiles.store import ProfileStore
    from orchestrator.config.sketch import load_sketch
    from orchestrator.planning.proposal import propose_sketch
    from orchestrator.planning.wanted import build_request_from_sketch

    known = ProfileStore(profiles) if profiles is not None else None
    sketch = load_sketch(cluster)
    if placed is None:
        loaded, base = (None, Path()) if config is None else _load(config, present=False)
        return propose_sketch(sketch, build_request_from_sketch(sketch, loaded, base), known)
    target, base, taken = placed
    return propose_sketch(sketch, replace(build_request_from_sketch(sketch, target, base), taken=taken), known)


def _propose_target(
    target: ClusterConfig, config: Path | None, base: Path, profiles: Path | None, taken: tuple[TakenPlace, ...]
) -> PlanProposal:
    from dataclasses import replace

    from device_profiles.store import ProfileStore
    from orchestrator.daemon.bootstrap.planning import add_device_layers, build_local_request, propose_local
    from orchestrator.planning.proposal import propose_here
    from orchestrator.planning.wanted import build_request_from_config

    if target.plans_hosts and profiles is None:
        from orchestrator.config.load import default_config_path
        from orchestrator.daemon.bootstrap.fleet import propose_for_hosts
        from orchestrator.telemetry import setup_logging

        setup_logging("warning", target.logging.format)
        return asyncio.run(propose_for_hosts(target, config or default_config_path(), taken))
    if target.planned and profiles is None:
        return propose_local(target, base, build_local_request(target, base, taken))
    request = replace(build_request_from_config(target, base), taken=taken)
    if profiles is not None:
        return propose_here(request, ProfileStore(profiles), {})
    from orchestrator.machine.devices import list_devices_here, list_free_bytes
    from orchestrator.planning.profiling.work import profile_store

    here = list_devices_here()
    store, free = profile_store(target), list_free_bytes(here.seen)
    proposal = propose_here(request, store, free, seen=here.seen, lacks=here.lacks)
    return add_device_layers(target, base, proposal)


def _load(path: Path | None, *, present: bool) -> tuple[ClusterConfig, Path]:
    from orchestrator.config.load import default_config_path, load_config

    path = path or default_config_path()
    loaded = load_config(path, present=present)
    if present:
        from orchestrator.config.load import parse_config
        from orchestrator.config.source_text import read_text
        from orchestrator.daemon.bootstrap.memory_fit import refuse_misfits

        refuse_misfits(loaded, path, parse_config(read_text(path), path)[1])
    return loaded, path.resolve().parent


def _load_plan(
    name: str, config: Path | None, cluster: Path | None, profiles: Path | None, model: str | None
) -> tuple[Plan, dict[str, Any]]:
    """Return a plan, and what else was written of it: which of its replicas do not run (`missing`), and what is
    configured and not planned (`unmet`), where a daemon runs it. Raises OutriderError."""
    import msgspec

    from orchestrator.planning.wanted import PlanError
    from policies.planning.plan import Plan

    if name == PROPOSED:
        proposals = propose_plans(config, cluster, profiles, model, first=model is None)
        return next(iter(proposals.values())).plan, {}
    try:
        if name == RUNNING:
            written = _query_plan(config, model)
            if written.get("plan") is None:
                out = "".join(f"; {replica['why']}" for replica in written["missing"])
                way_out = "let it plan with model.adapter: auto"
                raise PlanError(f"the daemon runs what cluster.yaml says, without a plan{out}; {way_out}")
        else:
            written = json.loads(Path(name).read_text(encoding="utf-8"))
        return msgspec.convert(written["plan"], Plan), written
    except OSError as error:
        raise PlanError(f"{name}: cannot be read: {error.strerror}; write it with `outrider plan --json`") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{name}: is no plan ({error}); write it with `outrider plan --json`") from error


def _find_running(config: Path | None, model: str | None) -> dict[str, Any] | None:
    from orchestrator.cli.daemon_socket import StatusError

    try:
        answer = _query_plan(config, model)
    except StatusError:
        return None
    return answer if answer.get("plan") is not None else None


def _query_plan(config: Path | None, model: str | None) -> dict[str, Any]:
    """Return what a daemon says of the plan that it runs. Raises StatusError."""
    from orchestrator.cli.daemon_socket import name_model, query_daemon, socket_of

    return query_daemon(socket_of(config, None), name_model(model, "/admin/plan"))
