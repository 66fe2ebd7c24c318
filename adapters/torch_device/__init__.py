"""PyTorch: transformers' model classes over a paged KV cache of our own, on CPU and CUDA alike."""
