"""`outrider bench shards`: targets whose layers are in several processes, beside the same target in one."""
