"""A decoder-only model as every builder sees it: its shape (spec) and its weights, whatever file they come from."""
