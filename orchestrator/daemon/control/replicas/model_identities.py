"""Which content each model of a target had when it was loaded first: whatever is started later loads the same.

A source names a place, and what is there may be replaced at any time. The first worker that is ready says what it has
loaded. From then on workers are told with their start, until a reload names another content in their specs.

It also says in which numerical class it runs. On equal devices each would choose by what it measured, so chance would
give them unlike bits. No effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adapters.model_identity import ModelIdentity, ServedClass
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.draft_messages import DraftReady
from orchestrator.protocol.events import Event, Retuned
from orchestrator.protocol.model_pins import list_pinned, pin_options, pin_spec
from orchestrator.protocol.ready import Ready


class ModelIdentities:
    """What is known of content by source, and of classes by the content's digest."""

    def __init__(self) -> None:
        self._known: dict[str, ModelIdentity] = {}
        self._classes: dict[str, list[ServedClass]] = {}

    @property
    def known(self) -> Mapping[str, ModelIdentity]:
        return self._known

    def learn(self, spec: WorkerSpec, event: Event) -> str:
        """A worker of this spec said something: note what it has loaded first of all. Returns in what it differs from
        what it is to load, "" in nothing."""
        identities = list_told(event)
        if not identities:
            return ""
        wanted = list_pinned(spec.options)
        for identity in identities:
            if identity.source not in wanted:
                self._known.setdefault(identity.source, identity)
        return describe_difference(identities, self._known | wanted)

    def agree(self, event: Event) -> str:
        """A target's worker said something: note in which class it runs its models, where none on such devices has said
        it before. Returns how it differs from that one though it might do as well, "" where it does not or may not."""
        for identity in list_told(event):
            known = self._classes.setdefault(identity.digest, [])
            first = {served.place: served.name for served in known}
            for served in identity.classes:
                name = first.get(served.place)
                if name is None:
                    known.append(served)
                elif name != served.name and name in served.others:
                    return f"it runs in {served.name}, and others on such devices in {name}; the next worker does, too"
        return ""

    def pin(self, spec: WorkerSpec) -> WorkerSpec:
        return pin_spec(spec, self._known, self._classes)

    def pin_options(self, options: Mapping[str, object]) -> dict[str, object]:
        return pin_options(options, self._known, self._classes)


def list_told(event: Event) -> list[ModelIdentity]:
    match event:
        case Ready():
            return event.model.identities
        case Retuned(ready) if ready is not None:
            return ready.model.identities
        case DraftReady():
            return [event.drafter.identity] if event.drafter.identity is not None else []
        case _:
            return []


def describe_difference(identities: Sequence[ModelIdentity], wanted: Mapping[str, ModelIdentity]) -> str:
    """Return which models are not what they are to be, in a line; "" where all are."""
    differences = [
        f"{identity.source} has the digest {identity.digest} instead of {wanted[identity.source].digest}"
        for identity in identities
        if identity.source in wanted and wanted[identity.source].digest != identity.digest
    ]
    if not differences:
        return ""
    return (
        f"its model was replaced before it was loaded: {'; '.join(differences)}; the next worker loads what is served"
    )
