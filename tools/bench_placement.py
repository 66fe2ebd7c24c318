"""How fast plans are made, and how close they come to the best there is.

    python tools/bench_placement.py [--json OUT]

`plan_1k_seconds` and `plan_10k_seconds`: the slowest of a few clusters of 1,000 and 10,000 devices in 20 zones, the
target in 8 layer shards. `gap_to_exact`: on small clusters, the largest (exact - plan) / exact of predicted tokens per
second, where a mixed-integer program proves the best plan. Needs scipy (the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from orchestrator.cli.plan_bench.measure import measured


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")
    parser.add_argument("--instances", type=int, default=12, help="small clusters to prove (default: 12)")
    parser.add_argument("--clusters", type=int, default=3, help="large clusters of each size and kind (default: 3)")
    arguments = parser.parse_args()
    figures = measured(instances=arguments.instances, clusters=arguments.clusters, tell=print)
    print(json.dumps(figures["summary"], indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
