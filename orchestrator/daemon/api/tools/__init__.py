"""Tool calls: what may be called, the grammar of calls, and calls found in an answer as it comes."""
