"""cluster.yaml: the models, and reading it with errors that name file, line and key."""
