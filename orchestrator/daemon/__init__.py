"""The daemon's process: it serves the API, decides, and holds no model."""
