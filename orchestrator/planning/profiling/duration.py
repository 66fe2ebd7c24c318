"""How long measuring will take, said before it begins.

The seconds are those of two Zen 4 cores, by the size of a model's files. A short piece of work, done now, tells how
many times as long this machine takes, beside what other programs do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from adapters.model_source import resolve
from adapters.vocabulary import SIMULATED_PREFIX
from device_profiles.datasheet import GB
from device_profiles.device_load import PROCESSOR
from device_profiles.store import ProfileStore
from orchestrator.machine.device_sampler import DeviceSampler
from orchestrator.planning.profiling.work import Work
from orchestrator.protocol.measuring import STEPS_S
from policies.serving.device_load import predict_stretch

# A process with its libraries. ADR 0108: these only say how long it may take. A profile that is measured again took so
# long before.
_START_S: Final = 3.0
# A device's own rates (ADR 0108).
_DEVICE_S: Final = 4.0
# Larger than caches (ADR 0108).
_PROBE_BYTES: Final = 64 << 20
# ADR 0108: their mean is the machine's pace.
_PROBES: Final = 8
# ADR 0108: a second of looking at what others take.
_OTHERS_S: Final = 1.0
_PROBE_S: Final = 0.002  # one of them there
_LEAST_PACE, _MOST_PACE = 0.3, 10.0  # bounds of a pace that is believed. Not tuned.


@dataclass(frozen=True, slots=True)
class _Seconds:
    """What a stage takes: in any case, and for each GB of the model's files."""

    least: float
    per_gb: float

    def of(self, size_gb: float) -> float:
        return self.least + self.per_gb * size_gb


# Seconds of each stage, and for each GB of the model's files: ADR 0107 has 130 to 160 s for 1.1 GB.
_PREPARE: Final = _Seconds(4.0, 110.0)
_LOAD: Final = _Seconds(1.0, 4.0)  # as above
_FORWARDS: Final = _Seconds(STEPS_S, 12.0)
_TEXTS: Final = _Seconds(12.0, 60.0)  # as above
_TEXTS_KNOWN: Final = _Seconds(9.0, 25.0)  # as above
_COMPARE: Final = _Seconds(1.0, 15.0)  # as above


def measure_pace() -> float:
    """Return how many times as long this machine takes now: by reading memory for a moment, and by what other programs
    take of the processor. Takes a second."""
    sampler = DeviceSampler()
    sampler.sample()
    time.sleep(_OTHERS_S)
    others = predict_stretch(sampler.sample()[PROCESSOR].find_share()).factor
    numbers = np.ones(_PROBE_BYTES // 8)
    began_s = time.thread_time()
    for _ in range(_PROBES):
        numbers.sum()
    took_s = (time.thread_time() - began_s) / _PROBES
    return others * min(_MOST_PACE, max(_LEAST_PACE, took_s / _PROBE_S))


def predict_duration_s(work: Work, store: ProfileStore, pace: float, *, texts: bool = False) -> float:
    """Return the seconds that a piece of work will take. `texts`: what the target says is known when its turn comes.
    Raises what resolving its model raises."""
    known = work.find_model_profile(store)
    if known is not None and known.took_s and not known.unfinished:
        return _START_S + known.took_s
    return pace * _sum_stages(work, store, texts=texts or work.texts(store) is not None)


def _sum_stages(work: Work, store: ProfileStore, *, texts: bool) -> float:
    model = work.job.model
    if model.source.startswith(SIMULATED_PREFIX):
        size_gb = 0.0
    else:
        files = resolve(model.source, Path(model.base)).content
        size_gb = sum(path.stat().st_size for path in files) / GB
    stages = [_LOAD if work.is_prepared() else _PREPARE, _FORWARDS]
    if work.job.role == "draft":
        stages += [_COMPARE] if texts else []
    else:
        stages.append(_TEXTS_KNOWN if texts else _TEXTS)
    known = work.find_device_profile(store) is not None
    return _START_S + (0.0 if known else _DEVICE_S) + sum(stage.of(size_gb) for stage in stages)
