"""The names that adapters have, without importing any."""

OWN_ADAPTERS = ("onnx_rt", "openvino_rt", "simulated", "torch_device")
"""Those of this distribution, installed or not. All load ranges of layers (adapters.contract.ShardingAdapter)."""
ADAPTER_NAME_PATTERN = "[a-z][a-z0-9_]{0,63}"
"""What one of another distribution is called."""
