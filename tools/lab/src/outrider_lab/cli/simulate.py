"""`outrider simulate`: what a fleet would do with traffic, before any of it is bought or moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider_lab.bench.result import check_json_path, describe_machine, write_json

if TYPE_CHECKING:  # the simulator is loaded where something is simulated
    from outrider_lab.simulation.fleet import Fleet
    from outrider_lab.simulation.questions.answer import Answer


def simulate(
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="A sketch of the fleet, or a cluster.yaml (docs/planning.md).")
    ] = None,
    trace: Annotated[
        str,
        typer.Option(
            help="A trace (.jsonl, .csv, .yaml), or poisson:, bursts:, diurnal: or constant: with KEY=VALUE,... as in "
            "poisson:rate=5,seconds=600,prompt_tokens=256 (docs/simulation.md)."
        ),
    ] = "poisson:rate=1,seconds=600",
    config: Annotated[Path | None, typer.Option(help="A cluster.yaml whose model is the target.")] = None,
    profiles: Annotated[Path | None, typer.Option(help="A directory of stored profiles.")] = None,
    acceptance: Annotated[
        list[Path] | None,
        typer.Option(help="A recording of `outrider bench policy --record`, as NAME=FILE for a draft model's."),
    ] = None,
    faults: Annotated[Path | None, typer.Option(help="A schedule of faults in YAML (docs/simulation.md).")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="No request arrives later. 0: the trace's own end.")] = 0.0,
    requests: Annotated[int, typer.Option(min=0, help="At most so many. 0: all.")] = 0,
    max_running: Annotated[int, typer.Option(min=1, max=4096, help="Sequences of a replica at a time.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait, of all replicas.")] = 256,
    slo: Annotated[str, typer.Option(help="Objectives in ms for the goodput: ttft=500,tpot=50,e2e=9000.")] = "",
    validate: Annotated[
        bool, typer.Option("--validate", help="Compare the simulator with real runs on this machine: 10 to 15 minutes.")
    ] = False,
    only: Annotated[str, typer.Option(help="With --validate: only runs whose name this expression finds.")] = "",
    prompts: Annotated[
        Path | None, typer.Option(help="With --validate: JSON lines with `turns` or `prompt`; else those that ship.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="With --validate: keep models and profiles here; else they go with the run.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Nothing is drafted.")] = False,
    question: Annotated[
        str, typer.Option(help="Answer a question: there is `mix` (docs/simulation.md#the-mix-of-devices).")
    ] = "",
    share: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of a question's requests; fewer are faster.")] = 1.0,
    search: Annotated[bool, typer.Option("--search", help="Find the cheapest fleet that meets --slo.")] = False,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="--search: the share of requests that are to meet it.")
    ] = 0.95,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Simulate a fleet on a virtual clock: the daemon's decisions, measured or stated costs, recorded drafts."""
    if validate:
        from outrider_lab.cli.simulate_validate import validate_simulator

        validate_simulator(only, prompts, store, json_out)
        return
    from outrider_lab.bench.traffic.slo import parse_slo
    from outrider_lab.cli.simulate_table import print_simulation
    from outrider_lab.simulation.faults import FaultSchedule, load_faults
    from outrider_lab.simulation.run import Scenario
    from outrider_lab.simulation.run import simulate as run_simulation
    from outrider_lab.simulation.sketched import SimulatedLimits
    from outrider_lab.simulation.trace import open_trace

    check_json_path(json_out)
    if question:
        answer_question(question, cluster, config, profiles, acceptance or [], max_running, share, json_out)
        return
    if search:
        search_fleet(
            cluster,
            config,
            profiles,
            acceptance or [],
            trace,
            slo,
            attainment,
            max_running,
            max_waiting,
            json_out,
            speculates=not plain,
        )
        return
    objectives = {f"{name}_ms": bound for name, bound in parse_slo(slo).items()}
    requested = open_trace(trace)
    fleet = build_sketched_fleet(
        cluster, config, profiles, acceptance or [], SimulatedLimits(max_running), speculates=not plain
    )
    scenario = Scenario(
        fleet,
        requested,
        build_limits(max_running, max_waiting),
        objectives,
        load_faults(faults) if faults is not None else FaultSchedule(),
        seconds=seconds,
        requests=requests,
    )
    with show_progress() as told:
        result = run_simulation(scenario, told)
    result["environment"] = {**describe_machine(), "trace": trace, "cluster": str(cluster or config or "")}
    write_json(json_out, result)
    print_simulation(result)


def answer_question(
    name: str,
    cluster: Path | None,
    config: Path | None,
    profiles: Path | None,
    acceptance: list[Path],
    max_running: int,
    share: float,
    json_out: Path | None,
) -> None:
    """Answer a question about a sketch, or about the built-in one. Raises OutriderError."""
    from device_profiles.store import ProfileStore
    from outrider_lab.simulation.questions.asked import Asked, read_built_in
    from outrider_lab.simulation.questions.mix import answer_mix
    from outrider_lab.simulation.run import SimulationError
    from outrider_lab.simulation.sketched import AcceptanceBook, SimulatedLimits

    if name != "mix":
        raise SimulationError(f"--question {name}: there is none of that name; there is mix")
    sketch, request = read_built_in() if cluster is None else read_sketch(cluster, config)
    store = ProfileStore(profiles) if profiles is not None else None
    book = AcceptanceBook(read_acceptance(acceptance))
    with show_doing() as told:
        answer = answer_mix(Asked(sketch, request, book, SimulatedLimits(max_running), store, share, told))
    finish_answer(answer, json_out, cluster=str(cluster or "built in"))


def search_fleet(
    cluster: Path | None,
    config: Path | None,
    profiles: Path | None,
    acceptance: list[Path],
    trace: str,
    slo: str,
    attainment: float,
    max_running: int,
    max_waiting: int,
    json_out: Path | None,
    *,
    speculates: bool,
) -> None:
    """Find the cheapest fleet of a sketch's hosts that meets objectives for a trace. Raises OutriderError."""
    from device_profiles.store import ProfileStore
    from outrider_lab.bench.traffic.slo import parse_slo
    from outrider_lab.simulation.questions.asked import read_built_in
    from outrider_lab.simulation.questions.least_fleet import Wanted, find_least_fleet
    from outrider_lab.simulation.run import SimulationError
    from outrider_lab.simulation.sketched import AcceptanceBook, SimulatedLimits
    from outrider_lab.simulation.trace import open_trace

    objectives = {f"{name}_ms": bound for name, bound in parse_slo(slo).items()}
    if not objectives:
        raise SimulationError("--search: say what is to be met, as in --slo ttft=500,tpot=50")
    sketch, request = read_built_in() if cluster is None else read_sketch(cluster, config)
    wanted = Wanted(
        sketch,
        request,
        AcceptanceBook(read_acceptance(acceptance)),
        SimulatedLimits(max_running),
        ProfileStore(profiles) if profiles is not None else None,
        list(open_trace(trace)),
        build_limits(max_running, max_waiting),
        objectives,
        attainment,
        speculates,
    )
    with show_doing() as told:
        answer = find_least_fleet(wanted, told)
    finish_answer(answer, json_out, trace=trace, cluster=str(cluster or "built in"))


def finish_answer(answer: Answer, json_out: Path | None, **about: str) -> None:
    """Write and print what came of a question. `about`: what it was about, for the file's environment."""
    from outrider_lab.cli.simulate_table import print_answer

    write_json(json_out, {**answer.build_json(), "environment": {**describe_machine(), **about}})
    print_answer(answer)


def build_limits(max_running: int, max_waiting: int) -> Any:
    """Return the daemon's limits as it has them by default, but for these."""
    from orchestrator.config.model import ClusterSection
    from orchestrator.daemon.control.streams.admission import ControlLimits

    return ControlLimits(max_running, max_waiting, ClusterSection().max_restarts)


def build_sketched_fleet(
    cluster: Path | None,
    config: Path | None,
    profiles: Path | None,
    acceptance: list[Path],
    limits: Any,
    *,
    speculates: bool = True,
) -> Fleet:
    """Return the fleet that a sketch describes. Raises OutriderError."""
    from device_profiles.store import ProfileStore
    from outrider_lab.simulation.run import SimulationError
    from outrider_lab.simulation.sketched import AcceptanceBook, build_fleet

    if cluster is None:
        raise SimulationError("--cluster: a sketch of the fleet is needed; docs/cluster-sketch.yaml is one")
    sketch, asked = read_sketch(cluster, config)
    book = AcceptanceBook(read_acceptance(acceptance))
    store = ProfileStore(profiles) if profiles is not None else None
    return build_fleet(sketch, asked, book, limits, store, speculates=speculates)


def read_sketch(cluster: Path, config: Path | None) -> tuple[Any, Any]:
    """Return a sketch and what it asks for. Raises OutriderError."""
    from orchestrator.config.load import load_config
    from orchestrator.config.sketch import is_cluster_file, load_sketch
    from orchestrator.planning.wanted import build_request_from_sketch

    path = config or (cluster if is_cluster_file(cluster) else None)
    loaded = load_config(path, present=False) if path is not None else None
    sketch = load_sketch(cluster)
    return sketch, build_request_from_sketch(sketch, loaded, path.resolve().parent if path is not None else Path())


def read_acceptance(files: list[Path]) -> dict[str, Any]:
    """Return recorded requests by their drafter: those that ship, and those of files. Raises RecordingError."""
    from outrider_lab.simulation.recording import load_recording, read_shipped_requests

    found: dict[str, Any] = {"suffix": read_shipped_requests()}
    for one in files:
        name, equals, path = str(one).rpartition("=")
        kinds = load_recording(Path(path)).kinds
        found[name if equals else "suffix"] = kinds.get("good") or next(iter(kinds.values()))
    return found


@contextmanager
def show_progress() -> Iterator[Any]:
    """Show how far virtual time is, on a terminal."""
    with show_doing() as doing:
        yield lambda now_s, requests: doing(f"{now_s:,.0f} s simulated, {requests:,} requests")


@contextmanager
def show_doing() -> Iterator[Any]:
    """Show what is simulated, on a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulating", total=None)
        yield lambda text: bar.update(task, description=text)
