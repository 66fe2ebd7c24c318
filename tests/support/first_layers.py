"""A model's first layers as a model of their own: its shapes, its weights and its kernels in a fraction of its time."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader, GGUFWriter

_WRITTEN_ANYWAY = ("GGUF.", "general.architecture")


def write_first_layers(path: Path, source: Path, layers: int) -> Path:
    """Write a GGUF model's first `layers` layers, with its embedding, output and tokenizer, to `path` and return it."""
    reader = GGUFReader(str(source))
    family = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(str(path), family)
    for name, field in reader.fields.items():
        if not name.startswith(_WRITTEN_ANYWAY):
            value = layers if name == f"{family}.block_count" else field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        part, _, rest = tensor.name.partition(".")
        if part != "blk" or int(rest.partition(".")[0]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
