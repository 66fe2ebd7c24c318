"""`outrider health`: which parts of the fleet do not work as they should."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.cli.daemon_socket import find_daemon, name_model, query_daemon
from orchestrator.cli.options import AdminSocket, DaemonConfig, DaemonJson, DaemonPort, DaemonUrl, ModelName


def health(
    model: ModelName = None,
    config: DaemonConfig = None,
    port: DaemonPort = None,
    socket: AdminSocket = None,
    url: DaemonUrl = None,
    as_json: DaemonJson = False,
) -> None:
    """Show the models that do not serve, and why; the devices, hosts, links and workers that something went wrong
    with, and those that are kept from work."""
    place = find_daemon(url, socket, config, port)
    show_health(query_daemon(place, name_model(model, "/admin/health")), as_json=as_json)


def show_health(answer: dict[str, Any], *, as_json: bool) -> None:
    """Print the parts that are not healthy."""
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    from rich.table import Table

    from orchestrator.plain_table import add_row, wide_console

    console = wide_console()
    for one in answer["models"]:
        if one["phase"] != "ready":
            name = f"the model '{one['model']}'" if one["model"] else "the model"
            console.print(f"{name} is {one['phase']}: {one['detail']}", markup=False, highlight=False)
    if not answer["parts"]:
        console.print("all parts are healthy")
        return
    several = any("model" in one for one in answer["parts"])
    table = Table("part", "name", *(["model"] * several), "state", "nothing starts for", "last failure")
    for one in answer["parts"]:
        wait = f"{one['wait_s']:.0f} s" if one["wait_s"] else "-"
        whose = [one["model"]] if several else []
        add_row(table, one["kind"], one["name"], *whose, one["state"].replace("_", "-"), wait, one["why"])
    console.print(table)
    if any(one["state"] in ("draining", "cordoned") for one in answer["parts"]):
        console.print("`outrider uncordon NAME` lets one work again", markup=False, highlight=False)
