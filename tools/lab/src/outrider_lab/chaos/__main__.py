"""`python -m outrider_lab.chaos`: exits 0 when nothing was lost, 1 when something was, 2 where it cannot run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from orchestrator.errors import OutriderError
from outrider_lab.chaos.faults import KINDS, choose_kinds
from outrider_lab.chaos.records import is_whole
from outrider_lab.chaos.report import show_report
from outrider_lab.chaos.run import Options, make_run
from outrider_lab.chaos.service import Layout

_EPILOGUE = "kinds of faults:\n" + "\n".join(f"  {name:18}{kind.description}" for name, kind in KINDS.items())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m outrider_lab.chaos",
        description="Break a real daemon on purpose, under load, and say what its clients lost.",
        epilog=_EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the requests and the faults")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long requests and faults come")
    parser.add_argument("--json", type=Path, default=None, help="write the report here, and the daemon's log beside it")
    parser.add_argument("--model", choices=("default", "scripted"), default="scripted", help="what is served")
    parser.add_argument("--faults", default="", help="kinds, separated by commas; all that can be made here without it")
    parser.add_argument("--prompts", type=Path, default=None, help="JSON lines with `turns` or `prompt`")
    parser.add_argument("--streams", type=int, default=8, help="clients at a time")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--drafts", type=int, default=1, help="draft models with workers of their own, for each replica"
    )
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    return parser


def read_options(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Options:
    """Return what the run is to be; a wrong command line ends the process with 2."""
    if not 0 < arguments.minutes <= 24 * 60:
        parser.error("--minutes: more than 0, at most a day")
    for name, least, most in (("streams", 1, 1000), ("replicas", 1, 16), ("drafts", 0, 3)):
        if not least <= getattr(arguments, name) <= most:
            parser.error(f"--{name}: from {least} to {most}")
    asked = [name.strip() for name in arguments.faults.split(",") if name.strip()]
    for name in asked:
        if name not in KINDS:
            parser.error(f"--faults: no kind is called {name!r}; there are {', '.join(KINDS)}")
    layout = Layout(arguments.model, arguments.runtime, arguments.replicas, arguments.drafts, arguments.streams)
    kinds, skipped = choose_kinds(asked, layout)
    if not kinds:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        parser.error(f"--faults: none of them can be made here: {reasons}")
    if arguments.json is not None and not arguments.json.resolve().parent.is_dir():
        parser.error(f"{arguments.json}: there is no such directory")
    return Options(
        *(arguments.seed, 60.0 * arguments.minutes, layout, kinds, skipped), arguments.prompts, arguments.json
    )


def main() -> int:
    parser = build_parser()
    options = read_options(parser.parse_args(), parser)
    console = Console(stderr=True)
    try:
        report = make_run(options, console)
    except OutriderError as error:
        console.print(f"chaos: {error}", markup=False, highlight=False)
        return 2
    if options.json_out is not None:
        options.json_out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    show_report(report)
    if report["broken"]:
        return 2
    return 0 if is_whole(report["summary"]) else 1


if __name__ == "__main__":
    sys.exit(main())
