"""The inside of a worker process: it loads a model and decodes. No daemon imports it."""
