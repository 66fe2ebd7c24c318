"""OpenVINO: paged attention on CPU, ragged batches, rollback by a smaller past length."""
