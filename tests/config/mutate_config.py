"""Gives thousands of broken cluster.yaml files to the checks that `outrider serve` and `outrider reload` make.

    python -m tests.config.mutate_config [--count 10000] [--seed 1] [--json]

Each file is a shipped example with a few mutations. It has to be taken, or refused with a ConfigError that names the
file and a line. Anything else is a crash: another exception, more than 5 s of processor time, no end at all, a secret
in what is said. The exit code is 1 where there was one.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from adapters.contract import AdapterError
from orchestrator.config.changes import apply_changes, list_changes
from orchestrator.config.load import load_text
from orchestrator.config.model import ClusterConfig
from orchestrator.errors import ConfigError

ROOT: Final = Path(__file__).parents[2]
SECRETS: Final = ("outrider-Zr7hX2mQ9vK4pT1wB8sN6yL3", "hf_QwErTyUiOpAsDfGhJkLz", "pa55w0rd-of-redis")
"""Planted as values, keys and parts of addresses; nothing that is said may have them."""
_ADDRESS: Final = f"redis://user:{SECRETS[2]}@host:1"
SLOW_S: Final = 5.0
HUNG_S: Final = 120
_EXAMPLES: Final = ("cluster.yaml", "docs/cluster-with-drafts.yaml")
_SIMULATED: Final = """\
model: {source: 'simulated:toy', adapter: simulated, name: toy, replicas: {min: 1, max: 2, places: [{}, {cores: [0]}]}}
drafts:
  - {method: suffix, max_match: 8, memory: 1 MiB}
  - {method: model, source: 'simulated:toy', adapter: simulated, process: own, workers: {min: 1, max: 2}}
speculation: {method: auto, num_speculative_tokens: 6, pid: {set_point: 0.4, max_depth: 5}}
canary: {share: 0.1, speculation: {method: fixed, num_speculative_tokens: 3}}
models:
  - {source: 'simulated:toy', adapter: simulated, name: other, slo: {ttft_ms: 100}, kv_cache: 64 MiB}
devices: {threads: 1, cores: [0]}
placement: {objective: cost, pin_target: [x], score_weights: {health: 0.5}}
routing: {weights: {queue: 0.5}, hysteresis: 0.2}
failover: {standby: [{readiness: cold, threads: 1}], after_s: 1}
limits: {max_waiting: 5, max_body: 1 MiB, request_timeout_s: 3}
slo: {ttft_ms: 100, ttft_percentile: 90, late: refuse}
api: {port: 0, allowed_hosts: [a.example.org], allowed_origins: ['https://a.example.org']}
cluster: {runtime: local, max_restarts: 3}
journal: {memory: 2 MiB}
batches: {concurrency: 2}
logging: {level: debug}
"""
_NASTY: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -0.5, 1e308, float("nan"), float("inf"), "", " ", "\x00",
    "\u202e", "a" * 5000, "0", "null", "off", "no", "2026-01-01", "../../etc/passwd", "%s%n{}", [], [[]], [None], {},
    {"": ""}, {"a": {"b": {}}}, [1, "x"], list(range(3000)), "1 GiB", "1e9 GiB", "-1 MiB", "auto", "here", "off",
    "simulated:toy?x=1", "package:x/y", "hf:a/b", "\n", "#", *SECRETS[:2], _ADDRESS, {SECRETS[0]: SECRETS[1]},
)  # fmt: skip
_TEXTS: Final = (
    "\t", "\x00", "\ufeff", "\u2028", "&a ", "*a", "<<: ", "!!int ", "!!python/object:os.system ", "{", "}", "[", "]",
    "- ", ": ", "? ", "|", ">", "'", '"', "%YAML 9.9\n", "---\n", "...\n", "#", "\n", "\r", "  ", "&b [*b]",
    "!!binary xx ", "=", "~", *(f"\n{secret}\n" for secret in SECRETS[:2]),
)  # fmt: skip


@dataclass
class Found:
    """What came of the files. `crashes`: what each crash said, with the file's text."""

    taken: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    slowest: str = ""
    crashes: list[tuple[str, str]] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def read_examples() -> list[str]:
    """Return the texts that are mutated."""
    return [*((ROOT / name).read_text(encoding="utf-8") for name in _EXAMPLES), _SIMULATED, _SIMULATED]


def mutate_text(text: str, rng: random.Random) -> str:
    """Return a text with one change that knows nothing of YAML."""
    lines = text.splitlines(keepends=True)
    at, place = rng.randrange(len(lines)) if lines else 0, rng.randrange(len(text) + 1)
    match rng.randrange(7):
        case 0 if lines:
            del lines[at]
        case 1 if lines:
            lines.insert(at, rng.choice(lines))
        case 2 if lines:
            lines[at] = " " * rng.randrange(5) + lines[at].lstrip()
        case 3:
            return text[:place] + rng.choice(_TEXTS) + text[place:]
        case 4:
            return text[:place] + text[place + rng.randrange(1, 9) :]
        case 5:
            return text[:place]
        case _:
            return text[:place] + chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x110000)))) + text[place:]
    return "".join(lines)


def mutate_tree(text: str, rng: random.Random) -> str:
    """Return a text with one value, key or item changed; as it is where it is no YAML any more."""
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    holders = [one for one in _walk(tree) if one]
    if not holders:
        return text
    holder = rng.choice(holders)
    key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    others = rng.choice(holders)
    match rng.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice((f"{key}x", SECRETS[0], 3, "", "method", "name"))] = holder.pop(key)
        case 2:
            holder[key] = rng.choice(list(others.values()) if isinstance(others, dict) else others)
        case _:
            holder[key] = rng.choice(_NASTY)
    try:
        return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=rng.random() < 0.5))
    except (yaml.YAMLError, RecursionError, UnicodeError):
        return text


def _walk(tree: Any, depth: int = 0) -> list[Any]:
    """Return every mapping and list of a tree."""
    if not isinstance(tree, dict | list) or depth > 20:
        return []
    inner = tree.values() if isinstance(tree, dict) else tree
    return [tree, *(found for one in inner for found in _walk(one, depth + 1))]


def mutate(rng: random.Random, examples: list[str]) -> str:
    """Return an example with one to four mutations."""
    text = rng.choice(examples)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        text = rng.choice((mutate_tree, mutate_tree, mutate_text))(text, rng)
    return text


def judge(text: str, path: Path, running: ClusterConfig, found: Found) -> None:
    """Let a text be checked as a reload does, and note what came of it."""
    begun_s = time.process_time()  # of this process: the machine may have other work
    said = ""
    signal.alarm(HUNG_S)
    try:
        config = load_text(text, path)
        changes = list_changes(running, config)
        apply_changes(running, config, changes)
        said = "\n".join(f"{one.name}: {one.before} -> {one.after}" for one in changes)
        found.taken += 1
    except (ConfigError, AdapterError) as error:
        said = str(error)
        found.refused += 1
        first = said.splitlines()[0]
        found.kinds[re.sub(r"'[^']*'|\d+", "_", first.partition(": ")[2])[:60]] += 1
        if not isinstance(error, ConfigError) or not re.match(rf"{re.escape(str(path))}:\d+: ", first):
            found.crashes.append((f"no place: {type(error).__name__}: {first}", text))
    except Exception:
        found.crashes.append((traceback.format_exc(limit=-3), text))
    finally:
        signal.alarm(0)
    took_s = time.process_time() - begun_s
    if took_s > found.slowest_s:
        found.slowest_s, found.slowest = took_s, text
    if took_s > SLOW_S:
        found.crashes.append((f"took {took_s:.1f} s", text))
    if any(secret in said for secret in SECRETS):
        found.crashes.append((f"says a secret: {said}", text))
    if not said.isprintable() and any(not line.isprintable() for line in said.splitlines()):
        found.crashes.append((f"is not printable: {said!r}", text))


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError(f"no end within {HUNG_S} s")


def run(count: int, seed: int) -> Found:
    """Check so many files; the same seed makes the same files."""
    signal.signal(signal.SIGALRM, _give_up)
    rng, examples, found = random.Random(seed), read_examples(), Found()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "cluster.yaml"
        running = load_text("model: {source: 'simulated:toy', adapter: simulated}\n", path)
        for _ in range(count):
            judge(mutate(rng, examples), path, running, found)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="files")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    asked = parser.parse_args()
    found = run(asked.count, asked.seed)
    counts = {"files": asked.count, "taken": found.taken, "refused": found.refused, "crashed": len(found.crashes)}
    counts["slowest_ms"] = round(found.slowest_s * 1000)
    print(json.dumps(counts) if asked.json else ", ".join(f"{value} {name}" for name, value in counts.items()))
    for said, text in found.crashes[:20]:
        sys.stderr.write(f"--- {said}\n{text[:2000]}\n")
    sys.exit(bool(found.crashes))


if __name__ == "__main__":
    main()
