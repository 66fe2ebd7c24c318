"""The simulated runtime: no framework, no weights, one device called SIM, or as many as OUTRIDER_SIMULATED_DEVICES says
(SIM, SIM.1, SIM.2 and so on)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from adapters.contract import Exactness, LayerRange, LoadOptions, NumericalClass, Progress, Unsupported, check_layers
from adapters.simulated.model import ToyModel
from adapters.simulated.script import Script
from device_profiles.numerical_class import FIXED_WIDTH
from device_profiles.profile import DeviceProfile, Precision, WeightsFormat

SCRIPT_FILE = "script.txt"
DEVICES_VARIABLE = "OUTRIDER_SIMULATED_DEVICES"


class SimulatedAdapter:
    """Runs `simulated:toy`; a prepared model is a directory with the script in it."""

    name = "simulated"

    def devices(self) -> list[DeviceProfile]:
        return [
            DeviceProfile(
                self.name,
                f"SIM.{number}" if number else "SIM",
                "simulated",
                f"simulated device {number}" if number else "simulated device",
                1 << 30,
                (Precision.FP32,),
                kv_cache=(Precision.FP32,),
                exact_kv_cache=(Precision.FP32,),
            )
            for number in range(int(os.environ.get(DEVICES_VARIABLE, "1")))
        ]

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        for precision in (options.activations, options.kv_cache):
            if precision not in (None, Precision.FP32):
                raise Unsupported(f"{precision}: the simulated model is in fp32; leave it at auto")
        as_they_come = NumericalClass(Precision.FP32, Precision.FP32, apart=True)
        if options.exactness is not Exactness.BIT:
            return [[as_they_come]]
        return [[as_they_come], [NumericalClass(Precision.FP32, Precision.FP32, fixed_width=FIXED_WIDTH)]]

    def recipe(self, weights: WeightsFormat | None = None) -> str:
        """Name the format of what `prepare` writes; there are no weights."""
        return "simulated 1"

    def prepare(self, source: Path, target: Path, progress: Progress, weights: WeightsFormat | None = None) -> None:
        """Copy a script file. Raises ModelRefused when it is wrong."""
        text = source.read_text(encoding="utf-8").strip()
        Script.parse(text)
        (target / SCRIPT_FILE).write_text(text, encoding="utf-8")
        progress("write script", 1.0)

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> ToyModel:
        """Load the toy model. Raises ModelRefused when its script is wrong, Unsupported for a device,
        OutOfMemory where the script says so."""
        return self._load(prepared, options, None, progress)

    def load_layers(self, prepared: Path, options: LoadOptions, layers: LayerRange, progress: Progress) -> ToyModel:
        """Load a range of its layers. Raises what `load` raises; Unsupported where the range is not in the model."""
        return self._load(prepared, options, layers, progress)

    def _load(self, prepared: Path, options: LoadOptions, layers: LayerRange | None, progress: Progress) -> ToyModel:
        names = [device.name for device in self.devices()]
        if options.device not in names:
            raise Unsupported(f"simulated: there is no device {options.device!r}; there is {', '.join(names)}")
        script = Script.parse((prepared / SCRIPT_FILE).read_text(encoding="utf-8"))
        kept = layers or LayerRange(0, script.layers)
        check_layers(kept, script.layers)
        progress("load", 0.0)
        time.sleep(script.keep(kept).load_ms / 1000.0)
        script.check_room(options.kv_cache_bytes)
        progress("load", 1.0)
        return ToyModel(script, options, options.numerical_class or self.classes(options)[0][0], kept)
