"""`outrider plan`: where target and drafts would run, at which depth and speed, and why nothing else was chosen."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # loaded where a plan is made
    from orchestrator.config.model import ClusterConfig
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
    config: Config = None,
    cluster: Cluster = None,
    profiles: Profiles = None,
) -> None:
    """Say which device, runtime and precision would host the target, where drafts come from, and how fast it is."""
    if context.invoked_subcommand is not None:
        return
    from orchestrator.cli.plan_table import print_library, print_proposal

    if library:
        print_library()
        return
    proposal = propose_plan(config, cluster, profiles)
    if as_json:
        from orchestrator.planning.basis import plain

        print(json.dumps(plain(proposal), indent=1))
    else:
        print_proposal(proposal, explain=explain)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="A file of `plan --json`, `running` or `proposed`.")] = RUNNING,
    after: Annotated[str, typer.Argument(help="As the first.")] = PROPOSED,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences for programs.")] = False,
    config: Config = None,
    cluster: Cluster = None,
    profiles: Profiles = None,
) -> None:
    """Say what is different between two plans: by default between the daemon's and what would be planned now."""
    from dataclasses import asdict

    from orchestrator.cli.plan_table import print_diff
    from policies.planning.plan import diff as differences

    plans = [_load_plan(name, config, cluster, profiles) for name in (before, after)]
    found = differences(*plans)
    if as_json:
        gain = found.gain if found.before_tokens_per_s else None
        print(json.dumps({**asdict(found), "gain": gain}, indent=1))
    else:
        print_diff(found, before, after, plans[-1].currency)


def propose_plan(config: Path | None, cluster: Path | None, profiles: Path | None) -> PlanProposal:
    """Return what is planned for a sketch, or for this machine. Raises OutriderError or AdapterError."""
    from device_profiles.store import ProfileStore
    from orchestrator.config.sketch import is_cluster_file, load_sketch
    from orchestrator.planning.proposal import (
        build_request_from_config,
        build_request_from_sketch,
        propose_here,
        propose_sketch,
    )

    if cluster is not None:
        sketch = load_sketch(cluster)
        if config is None and is_cluster_file(cluster):
            config = cluster
        loaded, base = (None, Path()) if sketch.target is not None and config is None else _config(config, there=False)
        known = ProfileStore(profiles) if profiles is not None else None
        return propose_sketch(sketch, build_request_from_sketch(sketch, loaded, base), known)
    loaded, base = _config(config)
    if loaded.plans_hosts and profiles is None:
        from orchestrator.bootstrap.fleet import propose_for_hosts
        from orchestrator.config.load import default_config_path
        from orchestrator.telemetry import setup_logging

        setup_logging("warning", loaded.logging.format)
        return asyncio.run(propose_for_hosts(loaded, config or default_config_path()))
    asked = build_request_from_config(loaded, base)
    if profiles is not None:
        return propose_here(asked, ProfileStore(profiles), {})
    from orchestrator.loading.devices import list_devices_here
    from orchestrator.profiling.work import profile_store

    here = list_devices_here()
    return propose_here(asked, profile_store(loaded), here.free_bytes, present=here.hardware)


def _config(path: Path | None, *, there: bool = True) -> tuple[ClusterConfig, Path]:
    from orchestrator.config.load import default_config_path, load_config

    found = path or default_config_path()
    return load_config(found, there=there), found.resolve().parent


def _load_plan(name: str, config: Path | None, cluster: Path | None, profiles: Path | None) -> Plan:
    import msgspec

    from orchestrator.planning.proposal import PlanError
    from policies.planning.plan import Plan

    if name == PROPOSED:
        return propose_plan(config, cluster, profiles).plan
    try:
        if name == RUNNING:
            return msgspec.convert(_running(config)["plan"], Plan)
        return msgspec.convert(json.loads(Path(name).read_text(encoding="utf-8"))["plan"], Plan)
    except OSError as error:
        raise PlanError(f"{name}: cannot be read: {error.strerror}; write it with `outrider plan --json`") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{name}: is no plan ({error}); write it with `outrider plan --json`") from error


def _running(config: Path | None) -> dict[str, Any]:
    """Return the plan that the daemon of a configuration runs. Raises StatusError or PlanError."""
    from orchestrator.cli.daemon_socket import query_daemon, socket_of
    from orchestrator.planning.proposal import PlanError

    found = query_daemon(socket_of(config, None), "/admin/plan")
    if found.get("plan") is None:
        raise PlanError("the daemon runs what cluster.yaml says, without a plan; let it plan with model.adapter: auto")
    return found
