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
    for model in answer["models"]:
        if model["phase"] != "ready":
            name = f"the model '{model['model']}'" if model["model"] else "the model"
            print_lines(f"{name} is {model['phase']}: {model['detail']}")
    if not answer["parts"]:
        print_lines("all parts are healthy")
        return
    several = any("model" in part for part in answer["parts"])
    rows = []
    for part in answer["parts"]:
        wait = f"{part['wait_s']:.0f} s" if part["wait_s"] else "-"
        whose = [part["model"]] if several else []
        rows.append((part["kind"], part["name"], *whose, part["state"].replace("_", "-"), wait, part["why"]))
    print_table(("part", "name", *(["model"] * several), "state", "nothing starts for", "last failure"), rows)
    if any(part["state"] in ("draining", "cordoned") for part in answer["parts"]):
        print_lines("`outrider uncordon NAME` lets one work again")
