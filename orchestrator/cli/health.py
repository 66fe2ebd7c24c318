"""`outrider health`: which parts of the fleet do not work as they should."""

from __future__ import annotations

from typing import Any

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.daemon_socket import name_model
from orchestrator.cli.options import ModelName
from orchestrator.plain_table import print_lines, print_table


@admin_command
def health(daemon: Daemon, model: ModelName = None) -> None:
    """Show the models that do not serve, and why; the devices, hosts, links and workers that something went wrong
    with, and those that are kept from work."""
    show_health(daemon.ask(name_model(model, "/admin/health")))


def show_health(answer: dict[str, Any]) -> None:
    """Print the parts that are not healthy."""
    for one in answer["models"]:
        if one["phase"] != "ready":
            name = f"the model '{one['model']}'" if one["model"] else "the model"
            print_lines(f"{name} is {one['phase']}: {one['detail']}")
    if not answer["parts"]:
        print_lines("all parts are healthy")
        return
    several = any("model" in one for one in answer["parts"])
    rows = []
    for one in answer["parts"]:
        wait = f"{one['wait_s']:.0f} s" if one["wait_s"] else "-"
        whose = [one["model"]] if several else []
        rows.append((one["kind"], one["name"], *whose, one["state"].replace("_", "-"), wait, one["why"]))
    print_table(("part", "name", *(["model"] * several), "state", "nothing starts for", "last failure"), rows)
    if any(one["state"] in ("draining", "cordoned") for one in answer["parts"]):
        print_lines("`outrider uncordon NAME` lets one work again")
