"""Every benchmark: what `outrider bench` runs. The commands are in `orchestrator.cli`."""
