"""`outrider simulate`: what a fleet would do with traffic, before any of it is bought or moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider_lab.bench.result import check_json_path, describe_machine, write_json
from policies.serving.failover.standby import FailoverRules, OtherBits

if TYPE_CHECKING:  # the simulator is loaded where something is simulated
    from device_profiles.store import ProfileStore
    from orchestrator.config.sketch import Sketch
    from orchestrator.planning.wanted import PlanRequest
    from outrider_lab.simulation.questions.asked import Answer
    from outrider_lab.simulation.sketched import AcceptanceBook


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
    alike: Annotated[
        bool, typer.Option("--alike", help="All replicas of a fleet have equal bits, as with model.alike.")
    ] = False,
    other_bits: Annotated[
        OtherBits, typer.Option(help="What a replica may do for streams of other bits, as failover.other_bits.")
    ] = "new_requests",
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
    from outrider_lab.bench.traffic.outcome import parse_slo
    from outrider_lab.cli.simulate_table import print_simulation
    from outrider_lab.simulation.faults import FaultSchedule, load_faults
    from outrider_lab.simulation.questions.asked import Asked
    from outrider_lab.simulation.questions.least_fleet import Wanted, find_least_fleet
    from outrider_lab.simulation.questions.mix import answer_mix
    from outrider_lab.simulation.run import Scenario, SimulationError
    from outrider_lab.simulation.run import simulate as run_simulation
    from outrider_lab.simulation.sketched import SimulatedLimits, build_fleet
    from outrider_lab.simulation.trace import open_trace

    check_json_path(json_out)
    if question not in ("", "mix"):
        raise SimulationError(f"--question {question}: there is none of that name; there is mix")
    objectives = {f"{name}_ms": bound for name, bound in parse_slo(slo).items()}
    if search and not objectives:
        raise SimulationError("--search: say what is to be met, as in --slo ttft=500,tpot=50")
    limits, control = SimulatedLimits(max_running), build_limits(max_running, max_waiting, other_bits)
    sketch, asked, book, known = open_sketch(
        cluster, config, profiles, acceptance or [], built_in=bool(question or search)
    )
    asked = replace(asked, alike=alike or asked.alike)
    if question:
        with show_doing() as doing:
            answer = answer_mix(Asked(sketch, asked, book, limits, known, share, doing))
        finish_answer(answer, json_out, cluster=str(cluster or "built in"))
    elif search:
        with show_doing() as doing:
            answer = find_least_fleet(
                Wanted(
                    *(sketch, asked, book, limits, known),
                    told=doing,
                    trace=list(open_trace(trace)),
                    control=control,
                    slo=objectives,
                    attainment=attainment,
                    speculates=not plain,
                )
            )
        finish_answer(answer, json_out, trace=trace, cluster=str(cluster or "built in"))
    else:
        scenario = Scenario(
            build_fleet(sketch, asked, book, limits, known, speculates=not plain),
            open_trace(trace),
            control,
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


def finish_answer(answer: Answer, json_out: Path | None, **about: str) -> None:
    """Write and print what came of a question. `about`: what it was about, for the file's environment."""
    from outrider_lab.cli.simulate_table import print_answer

    write_json(json_out, {**answer.build_json(), "environment": {**describe_machine(), **about}})
    print_answer(answer)


def build_limits(max_running: int, max_waiting: int, other_bits: OtherBits) -> Any:
    """Return the daemon's limits as it has them by default, but for these."""
    from orchestrator.config.model import ClusterSection
    from orchestrator.daemon.control.streams.admission import ControlLimits

    rules = FailoverRules(other_bits=other_bits)
    return ControlLimits(max_running, max_waiting, ClusterSection().max_restarts, failover=rules)


def open_sketch(
    cluster: Path | None, config: Path | None, profiles: Path | None, acceptance: list[Path], *, built_in: bool
) -> tuple[Sketch, PlanRequest, AcceptanceBook, ProfileStore | None]:
    """Return a sketch (without a file the `built_in` one), what it asks for, how drafts go, and stored profiles. Raises
    OutriderError."""
    from device_profiles.store import ProfileStore
    from orchestrator.config.load import load_config
    from orchestrator.config.sketch import is_cluster_file, load_sketch
    from orchestrator.planning.wanted import build_request_from_sketch
    from outrider_lab.simulation.questions.asked import read_built_in
    from outrider_lab.simulation.run import SimulationError
    from outrider_lab.simulation.sketched import AcceptanceBook

    book = AcceptanceBook(read_acceptance(acceptance))
    store = ProfileStore(profiles) if profiles is not None else None
    if cluster is None:
        if built_in:
            return *read_built_in(), book, store
        raise SimulationError("--cluster: a sketch of the fleet is needed; docs/cluster-sketch.yaml is one")
    path = config or (cluster if is_cluster_file(cluster) else None)
    loaded = load_config(path, present=False) if path is not None else None
    sketch = load_sketch(cluster)
    base = path.resolve().parent if path is not None else Path()
    return sketch, build_request_from_sketch(sketch, loaded, base), book, store


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
    with show_doing() as doing:
        yield lambda now_s, requests: doing(f"{now_s:,.0f} s simulated, {requests:,} requests")


@contextmanager
def show_doing() -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulating", total=None)
        yield lambda text: bar.update(task, description=text)
