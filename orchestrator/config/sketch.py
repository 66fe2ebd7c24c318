"""A cluster sketch: hosts, devices and links of a cluster that is not there, for `outrider plan --cluster FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from device_profiles.profile import Exactness
from orchestrator.config.placement import PlacementSection
from orchestrator.config.section import Section, Size
from orchestrator.config.source_text import parse_text, read_text
from orchestrator.config.wording import problems
from orchestrator.errors import ConfigError

Weights = Literal["as_file", "fast", "int4", "int8", "fp8", "bf16", "fp16", "fp32"]
_Name = Annotated[str, Field(min_length=1, max_length=128)]


class SketchedDevice(Section):
    """Devices of one kind on a host."""

    device: _Name
    """A device of the shipped library (`outrider plan --library` lists them), or of a stored profile."""
    count: int = Field(default=1, ge=1, le=1024)
    """How many of them the host has."""
    memory: Size | None = None
    """Memory of each, where it differs from the library's. CPUs and NPUs use the host's."""


class SketchedHost(Section):
    """A machine, or several that are alike."""

    name: _Name
    """Its name; of several `NAME-1`, `NAME-2` and so on."""
    count: int = Field(default=1, ge=1, le=10_000)
    """How many there are."""
    zone: str = ""
    """Its failure domain, with a network of its own."""
    cores: int = Field(default=0, ge=0, le=4096)
    """Cores that workers may use; 0: as many as its CPU's description has."""
    memory: Size
    """Main memory, which CPUs and NPUs work in."""
    devices: tuple[SketchedDevice, ...] = Field(min_length=1, max_length=64, strict=False)
    """What it has."""


class SketchedLink(Section):
    """What lies between two workers."""

    rtt_ms: float = Field(ge=0, le=60_000)
    """A small message there and back."""
    gbit_per_s: float = Field(gt=0, le=1_000_000)
    """The rate of a large transfer."""


class SketchedLinkBetween(SketchedLink):
    """What lies between two hosts."""

    hosts: tuple[_Name, _Name] = Field(strict=False)
    """The two hosts."""


class SketchedLinks(Section):
    """Links by class, and those that differ from their class."""

    same_host: SketchedLink | None = None
    """Between two workers on a host."""
    same_zone: SketchedLink | None = None
    """Between hosts of a zone."""
    other_zone: SketchedLink | None = None
    """Between hosts of different zones."""
    between: tuple[SketchedLinkBetween, ...] = Field(default=(), max_length=10_000, strict=False)
    """Between named hosts."""


class Shape(Section):
    """A dense decoder's sizes, in elements, as its config.json has them."""

    layers: int = Field(ge=1, le=1024)
    """`num_hidden_layers`"""
    hidden: int = Field(ge=1, le=1_000_000)
    """`hidden_size`"""
    heads: int = Field(ge=1, le=4096)
    """`num_attention_heads`"""
    kv_heads: int = Field(ge=1, le=4096)
    """`num_key_value_heads`"""
    head_dim: int = Field(ge=1, le=4096)
    """`head_dim`, or `hidden_size` / `num_attention_heads`"""
    mlp: int = Field(ge=1, le=10_000_000)
    """`intermediate_size`"""
    vocabulary: int = Field(ge=1, le=10_000_000)
    """`vocab_size`"""
    tied_embeddings: bool = False
    """`tie_word_embeddings`"""


class SketchedModel(Section):
    """A model by its shape: nothing of it has to be there."""

    name: _Name
    """Its name."""
    shape: Shape
    """Its sizes."""
    weights: tuple[Weights, ...] = Field(default=("bf16",), min_length=1, strict=False)
    """Number formats of the weights to choose from."""


class SketchedDraft(SketchedModel):
    """A draft model by its shape."""

    acceptance: float = Field(gt=0, lt=1)
    """The chance that a token of it is accepted."""


class Sketch(Section):
    """The whole of a sketch."""

    hosts: tuple[SketchedHost, ...] = Field(min_length=1, max_length=10_000, strict=False)
    """The machines."""
    links: SketchedLinks = SketchedLinks()
    """What lies between them."""
    target: SketchedModel | None = None
    """The target; left out: that of cluster.yaml."""
    drafts: tuple[SketchedDraft, ...] = Field(default=(), max_length=4, strict=False)
    """Draft models to choose from, beside drafts from the text itself; they go with `target`."""
    exactness: Annotated[Exactness, Field(strict=False)] = Exactness.BIT
    """As `model.exactness`, for `target`."""
    num_speculative_tokens: int = Field(default=12, ge=0, le=64)
    """The deepest that drafts may be, for `target`."""
    replicas: int = Field(default=1, ge=1, le=1024)
    """How many targets may be placed at most, for `target`."""
    placement: PlacementSection | None = None
    """What the plan is for; left out: that of cluster.yaml, or its defaults."""


def load_sketch(path: Path) -> Sketch:
    """Read and check a sketch. Raises ConfigError, one line a problem."""
    data, lines = parse_text(read_text(path), path, least="hosts")
    try:
        sketch = Sketch.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems(error, path, lines, Sketch)) from error
    if sketch.drafts and sketch.target is None:
        raise ConfigError(f"{path}:{lines.get(('drafts',), 1)}: drafts: go with `target`; add it, or leave them out")
    names = [host.name for host in sketch.hosts]
    for index, name in enumerate(names):
        if name in names[:index]:
            line = lines.get(("hosts", index, "name"), 1)
            raise ConfigError(f"{path}:{line}: hosts[{index}].name: {name!r} is there twice; use `count`")
    known = {one for host in sketch.hosts for one in host_names(host)}
    for index, link in enumerate(sketch.links.between):
        for name in link.hosts:
            if name not in known:
                line = lines.get(("links", "between", index, "hosts"), 1)
                raise ConfigError(f"{path}:{line}: links.between[{index}].hosts: there is no host {name!r}")
    return sketch


def host_names(host: SketchedHost) -> list[str]:
    """Return the names of the machines that an entry stands for."""
    return [host.name] if host.count == 1 else [f"{host.name}-{number}" for number in range(1, host.count + 1)]
