"""`outrider health`: which parts of the fleet do not work as they should."""

from __future__ import annotations

from typing import Any

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.daemon_socket import name_model
from orchestrator.cli.options import ModelName


@admin_command
def health(daemon: Daemon, model: ModelName = None) -> None:
    """Show the models that do not serve, and why; the devices, hosts, links and workers that something went wrong
    with, and those that are kept from work."""
    show_health(daemon.ask(name_model(model, "/admin/health")))


def show_health(answer: dict[str, Any]) -> None:
    """Print the parts that are not healthy."""
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
