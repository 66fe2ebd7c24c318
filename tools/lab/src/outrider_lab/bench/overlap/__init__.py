"""`outrider bench overlap`: drafting while the target verifies, beside drafting before it does, and none."""
