"""Backend adapters: the only importers of inference frameworks."""
