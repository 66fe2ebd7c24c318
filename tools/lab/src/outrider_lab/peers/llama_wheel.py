"""llama-server out of the wheel of xllamacpp, with as many of its arguments as a comparison gives.

Runs as a file, in a process of its own, and imports nothing of ours. It ends with SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    asked = parse_arguments()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # the server's threads take this over
    import xllamacpp

    sys.stderr.write(f"system_info: {xllamacpp.get_system_info()}\n")
    server = xllamacpp.Server(build_params(xllamacpp, asked))
    signal.sigwait([signal.SIGTERM])
    del server


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return what llama-server's arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("-md", dest="draft", default="")
    for name, short in (("threads", "-t"), ("context", "-c"), ("slots", "-np"), ("verbosity", "-lv")):
        parser.add_argument(short, dest=name, type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--api-key-file", default="")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--spec-type", choices=("none", "draft-simple", "ngram-simple"), default="none")
    for name in ("--spec-draft-n-max", "--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m"):
        parser.add_argument(name, type=int)
    return parser.parse_args(arguments)


def build_params(library: Any, asked: argparse.Namespace) -> Any:
    params = library.CommonParams()
    params.model.path = asked.model
    params.hostnames, params.port = [asked.host], asked.port
    params.ui = False
    params.endpoint_metrics = asked.metrics
    if asked.api_key_file:
        params.api_keys = Path(asked.api_key_file).read_text(encoding="utf-8").split()
    _set(params, n_ctx=asked.context, n_parallel=asked.slots, verbosity=asked.verbosity)
    speculative = params.speculative
    draft, ngram = speculative.draft, speculative.ngram_simple
    # llama-server's own arguments set all four, where only one is given.
    for cpu in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        _set(cpu, n_threads=asked.threads)
    types = library.common_speculative_type
    if asked.spec_type != "none":
        speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{asked.spec_type.replace('-', '_').upper()}")]
    if asked.draft:
        draft.mparams.path = asked.draft
    _set(draft, n_max=asked.spec_draft_n_max)
    _set(ngram, size_n=asked.spec_ngram_simple_size_n, size_m=asked.spec_ngram_simple_size_m)
    return params


def _set(target: Any, **values: int | None) -> None:
    """Set what was given, and leave the rest at the library's default."""
    for name, value in values.items():
        if value is not None:
            setattr(target, name, value)


if __name__ == "__main__":
    main()
