"""A cluster sketch: hosts, devices and links of a cluster that is not there, for `outrider plan --cluster FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from device_profiles.profile import Exactness
from orchestrator.config.hosts import ClusterHost, ClusterLinks, Name, check_hosts, check_sketched_hosts
from orchestrator.config.load import parse_config
from orchestrator.config.placement import PlacementSection
from orchestrator.config.section import Section
from orchestrator.config.source_text import SourceFile, parse_text, read_text
from orchestrator.config.wording import problems
from orchestrator.errors import ConfigError

Weights = Literal["as_file", "fast", "int4", "int8", "fp8", "bf16", "fp16", "fp32"]


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

    name: Name
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

    hosts: tuple[ClusterHost, ...] = Field(min_length=1, max_length=10_000, strict=False)
    """The machines."""
    links: ClusterLinks = ClusterLinks()
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
    """Read and check a sketch, or a cluster.yaml whose `hosts` say what they have: its model is the target then. Raises
    ConfigError, one line a problem."""
    return _read_cluster(path) if is_cluster_file(path) else parse_sketch(read_text(path), path)


def parse_sketch(text: str, path: Path) -> Sketch:
    """Return the sketch that a text is. Raises ConfigError."""
    data, lines = parse_text(text, path, least="hosts")
    try:
        sketch = Sketch.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems(error, path, lines, Sketch)) from error
    file = SourceFile(path, lines)
    if sketch.drafts and sketch.target is None:
        raise file.refuse(("drafts",), "go with `target`; add it, or leave them out")
    check_hosts(sketch.hosts, sketch.links, file)
    check_sketched_hosts(sketch.hosts, file)
    return sketch


def is_cluster_file(path: Path) -> bool:
    """Return whether a file is a whole cluster.yaml, with a model of its own. Raises ConfigError."""
    data, _ = parse_text(read_text(path), path, least="hosts")
    return isinstance(data, dict) and "model" in data


def _read_cluster(path: Path) -> Sketch:
    config, lines = parse_config(read_text(path), path)
    file = SourceFile(path, lines)
    check_hosts(config.hosts, config.links, file)
    if not config.hosts:
        raise file.refuse(("hosts",), "is missing: a plan for a cluster that is not there needs its hosts")
    check_sketched_hosts(config.hosts, file)
    return Sketch(hosts=config.hosts, links=config.links, placement=config.placement)
