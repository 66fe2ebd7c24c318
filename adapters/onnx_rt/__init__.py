"""ONNX Runtime: a graph of our own over grouped-query attention, KV cache in place, rollback by a smaller length."""
