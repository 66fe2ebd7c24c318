"""`outrider extras`: libraries beside Outrider's own, in the versions that were tested."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from orchestrator.cli.options import AsJson, end_with_json
from orchestrator.plain_table import print_lines, print_table

app = typer.Typer(no_args_is_help=True, help="Libraries beside Outrider's own, in the versions that were tested.")
Names = Annotated[list[str], typer.Argument(metavar="EXTRA...", help="As in `ray llama onnx torch`.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and change nothing.")]


@app.command("list")
def show(as_json: AsJson = False) -> None:
    """List the extras: what was tested, and what is installed."""
    from orchestrator.setup.extras import describe_extra, list_extras, read_tested

    tested = read_tested()
    extras = {name: describe_extra(needs, tested) for name, needs in list_extras().items()}
    plain = {name: [asdict(package) for package in packages] for name, packages in extras.items()}
    end_with_json(plain, wanted=as_json)
    rows = [
        (name, package.name, package.tested, package.installed or "-", "another version" if package.differs else "")
        for name, packages in extras.items()
        for package in packages
    ]
    print_table(("extra", "package", "tested", "installed", ""), rows)


@app.command("install")
def install_extras(names: Names, as_json: AsJson = False, dry_run: DryRun = False) -> None:
    """Install the libraries of extras into this interpreter's environment, in exactly the tested versions.

    pip brings them, from the package index that it is set up for. What is there in another version is replaced. Of a
    library with builds for several devices, as torch, the index says which build it is.
    """
    import shlex

    from orchestrator.setup.extras import build_command, choose_extras, describe_extra, install, read_tested

    needs = choose_extras(names)
    command = build_command(needs)
    if not dry_run:
        install(needs, quiet=as_json)
    packages = describe_extra(needs, read_tested())
    rows = [asdict(package) for package in packages]
    end_with_json({"extras": names, "command": command, "run": not dry_run, "packages": rows}, wanted=as_json)
    if dry_run:
        print_lines(shlex.join(command), wraps=False)
        print_lines(*(f"{package.name} {package.tested}" for package in packages))
    else:
        print_lines(*(f"{package.name} {package.installed} is installed" for package in packages))
