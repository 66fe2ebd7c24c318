"""What is started later loads what was loaded first, and no stream goes on with another model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.model_identity import ModelIdentity, ServedClass
from orchestrator.daemon.control.actions import EndStream, Send, StartWorker, StopWorker
from orchestrator.daemon.control.events import (
    ClusterOpened,
    ControlEvent,
    StreamOpened,
    WorkerEnded,
    WorkerEnding,
    WorkerSaid,
    WorkersChosen,
    WorkerStarted,
)
from orchestrator.daemon.control.replicas.model_identities import ModelIdentities
from orchestrator.daemon.control.state import FAILED
from orchestrator.daemon.control.step import State, step
from orchestrator.launch.local import digest_worker
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.events import Failed
from orchestrator.protocol.model_pins import drop_identities, list_pinned, pin_spec
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Delta, RoundReport
from policies.serving.failover.standby import NO_RULES
from tests.api.support import READY
from tests.support.ready import change_ready

FIRST, OTHER = ModelIdentity("m.gguf", "1" * 16, "m"), ModelIdentity("m.gguf", "2" * 16, "m")


def write_identity(identity: ModelIdentity | None) -> Any:
    """Return an identity as the options of a worker have it."""
    return msgspec.json.decode(msgspec.json.encode(identity))


IDENTITIES = st.builds(ModelIdentity, st.sampled_from(["a", "b", "c"]), st.sampled_from(["1" * 16, "2" * 16]))
MODELS = st.builds(
    lambda source, identity: {"source": source, "store": "/store", "identity": identity, "threads": 2},
    st.sampled_from(["a", "b", "c"]),
    st.none() | IDENTITIES.map(write_identity),
)
OPTIONS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "model": MODELS,
        "drafters": st.lists(st.fixed_dictionaries({"name": st.just("d"), "model": MODELS}), max_size=3),
        "canary": st.none() | st.fixed_dictionaries({"drafters": st.lists(st.fixed_dictionaries({"model": MODELS}))}),
    }
)
KNOWN = st.lists(IDENTITIES).map(lambda found: {one.source: one for one in found})


def model_spec(identity: ModelIdentity | None = None, name: str = "target") -> WorkerSpec:
    told = None if identity is None else msgspec.to_builtins(identity)
    return WorkerSpec(name, "no:where", {"model": {"source": "m.gguf", "store": "/store", "identity": told}})


def list_models(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        own = [value] if "identity" in value else []
        return own + [one for below in value.values() for one in list_models(below)]
    return [one for below in value for one in list_models(below)] if isinstance(value, list) else []


@given(OPTIONS, KNOWN)
def test_every_model_is_told_what_is_known_and_keeps_what_it_was_told(
    options: dict[str, Any], known: dict[str, ModelIdentity]
) -> None:
    part = WorkerSpec("part", "no:where", {"model": options["model"], "start": "x"})
    spec = WorkerSpec("target", "no:where", options, parts=[part])
    pinned = pin_spec(spec, known)
    for before, after in zip(list_models(options), list_models(pinned.options), strict=True):
        wanted = before["identity"] or write_identity(known.get(before["source"]))
        assert after == before | {"identity": wanted}
    assert pinned.parts[0].options["model"] == pinned.options["model"]
    assert pin_spec(pinned, known) == pinned
    assert set(list_pinned(pinned.options)) == {one["source"] for one in list_models(pinned.options) if one["identity"]}
    assert drop_identities(pinned) == drop_identities(spec)
    assert digest_worker(pinned, {}) == digest_worker(spec, {}), "the next daemon takes it for the same worker"


@given(st.lists(IDENTITIES, min_size=1))
def test_what_was_told_first_counts(told: list[ModelIdentity]) -> None:
    found = ModelIdentities()
    first: dict[str, ModelIdentity] = {}
    for one in told:
        first.setdefault(one.source, one)
        why = found.learn(WorkerSpec("t", "no:where", {}), change_ready(READY, identities=[one]))
        assert bool(why) is (first[one.source].digest != one.digest)
    assert found.known == first


def test_what_a_spec_asks_for_goes_before_and_is_no_first() -> None:
    found = ModelIdentities()
    assert not found.learn(model_spec(OTHER), change_ready(READY, identities=[OTHER]))
    assert not found.learn(model_spec(), change_ready(READY, identities=[FIRST]))
    assert found.known == {"m.gguf": FIRST}
    assert "instead of 2222" in found.learn(model_spec(OTHER), change_ready(READY, identities=[FIRST]))


def serve_in(name: str, *others: str, place: str = "AMD EPYC; openvino_rt") -> Ready:
    identity = replace(FIRST, classes=[ServedClass(place, name, list(others))])
    return change_ready(READY, identities=[identity])


def test_equal_devices_run_a_model_in_the_class_of_the_first() -> None:
    """Each measured what its classes cost, and noise decided: so their streams could not go on with each other."""
    identities = ModelIdentities()
    assert not identities.agree(serve_in("bf16", "fp32", "bf16"))
    why = identities.agree(serve_in("fp32", "bf16"))
    assert "runs in fp32" in why
    assert "in bf16; the next worker does, too" in why
    assert not identities.agree(serve_in("bf16"))
    assert not identities.agree(serve_in("fp32")), "bf16 does not hold there"
    assert not identities.agree(serve_in("fp32", "bf16", place="Xeon; openvino_rt"))
    for identity in (None, FIRST, replace(FIRST, name="a link")):  # learnt, or named by a reload
        if identity is None:
            assert not identities.learn(model_spec(), serve_in("bf16"))
        pinned = list_pinned(identities.pin(model_spec(identity)).options)["m.gguf"]
        assert pinned.name == (identity or FIRST).name
        places = [(served.place, served.name) for served in pinned.classes]
        assert places == [("AMD EPYC; openvino_rt", "bf16"), ("Xeon; openvino_rt", "fp32")]
    assert not list_pinned(identities.pin(model_spec(OTHER)).options)["m.gguf"].classes, "of another content"


def test_a_worker_in_another_class_is_exchanged_once_and_is_no_loss() -> None:
    def serve(name: str, *others: str) -> ModelIdentity:
        return serve_in(name, *others).model.identities[0]

    target = Target(2, max_restarts=0)
    first, second = (action.worker for action in target.started if isinstance(action, StartWorker))
    target.make_ready(first, serve("bf16"))
    ended = target.make_ready(second, serve("fp32", "bf16"))
    assert [action.worker for action in ended if isinstance(action, StopWorker)] == [second]
    actions = target.lose(second)
    assert [action.after_s for action in actions if isinstance(action, StartWorker)] == [0.0]
    assert not target.state.losses
    target.make_ready(second, serve("fp32", "bf16"))
    actions = target.lose(second)
    assert [action.after_s for action in actions if isinstance(action, StartWorker)] == [60.0], "it did not change"
    target.make_ready(second, serve("bf16"))
    assert [replica.state.phase for replica in target.state.replicas.list_all()] == ["ready", "ready"]


class Target:
    """A target of some replicas, whose workers do as they are told."""

    def __init__(self, replicas: int = 1, max_restarts: int = 5) -> None:
        self.state = State(max_restarts)
        self.now_s = 0.0
        self.tell(WorkersChosen([model_spec(name=f"target-{one}") for one in range(replicas)], [], (), NO_RULES))
        self.started = self.tell(ClusterOpened())

    def tell(self, event: ControlEvent) -> list[Any]:
        self.now_s += 0.1
        return step(self.state, event, self.now_s)

    def make_ready(self, worker: int, *identities: ModelIdentity, vocabulary: str = "v") -> list[Any]:
        self.tell(WorkerStarted(worker, "here"))
        ready = change_ready(
            READY,
            identities=list(identities),
            model_digest=identities[0].digest if identities else "",
            vocabulary_fingerprint=vocabulary,
        )
        return self.tell(WorkerSaid(worker, ready))

    def lose(self, worker: int, *said: Failed) -> list[Any]:
        actions = [one for event in said for one in self.tell(WorkerSaid(worker, event))]
        actions += self.tell(WorkerEnding(worker, "gone", "killed"))
        return [*actions, *self.tell(WorkerEnded(worker, "gone", "killed"))]


def test_a_worker_that_has_loaded_another_model_is_ended_and_the_next_one_is_told() -> None:
    target = Target(replicas=2)
    assert not [one for one in target.make_ready(0, FIRST) if isinstance(one, StopWorker)]
    assert [one for one in target.make_ready(1, OTHER) if isinstance(one, StopWorker)] == [StopWorker(1, 0.0)]
    assert [one.worker for one in target.lose(1) if isinstance(one, StartWorker)] == [1]
    assert list_pinned(target.state.identities.pin(model_spec()).options) == {"m.gguf": FIRST}
    target.make_ready(1, FIRST)
    assert all(one.serving for one in target.state.replicas.serving)


def test_a_model_that_is_nowhere_is_not_tried_again_though_its_worker_served() -> None:
    target = Target()
    target.make_ready(0, FIRST)
    target.tell(StreamOpened(Submit("one", [1, 2], 9)))
    assert [one for one in target.lose(0) if isinstance(one, StartWorker)]
    target.tell(WorkerStarted(0, "here"))
    gone = Failed("m.gguf: it is nowhere", restartable=False, kind="model_replaced")
    actions = target.lose(0, gone)
    assert not [one for one in actions if isinstance(one, StartWorker)]
    (ended,) = [one for one in actions if isinstance(one, EndStream)]
    assert (ended.error.status, "it is nowhere" in ended.error.message) == (503, True)
    assert target.state.replicas.serving[0].state.phase == FAILED
    assert target.state.health.quiet, "no device is to blame"


@pytest.mark.parametrize(
    ("submit", "digest", "vocabulary", "status"),
    [
        (Submit("s", [1], 9, model_digest="1" * 16, vocabulary="v"), "1" * 16, "v", None),
        (Submit("s", [1], 9, model_digest="2" * 16, vocabulary="v"), "1" * 16, "v", None),
        (Submit("s", [1], 9), "1" * 16, "v", None),
        (Submit("s", [1], 9, committed=[1]), "1" * 16, "v", None),
        (Submit("s", [1], 9, committed=[1], model_digest="1" * 16, vocabulary="v"), "1" * 16, "v", None),
        (Submit("s", [1], 9, model_digest="2" * 16, vocabulary="w"), "1" * 16, "v", 503),
        (Submit("s", [1], 9, committed=[1], model_digest="2" * 16, vocabulary="v"), "1" * 16, "v", 410),
        (Submit("s", [1], 9, committed=[1], model_digest="2" * 16, vocabulary="w"), "1" * 16, "v", 410),
    ],
)
def test_a_request_of_another_model_is_not_sent(
    submit: Submit, digest: str, vocabulary: str, status: int | None
) -> None:
    target = Target()
    target.make_ready(0, ModelIdentity("m.gguf", digest), vocabulary=vocabulary)
    actions = target.tell(StreamOpened(submit))
    assert [one.error.status for one in actions if isinstance(one, EndStream)] == ([] if status is None else [status])
    assert bool([one for one in actions if isinstance(one, Send)]) is (status is None)
    assert len(target.state.streams) == (status is None)


def test_a_stream_that_has_tokens_ends_where_only_another_model_is_left() -> None:
    target = Target()
    target.make_ready(0, FIRST)
    target.tell(StreamOpened(Submit("s", [1], 9)))
    target.tell(WorkerSaid(0, RoundReport([Delta("s", [5])], 1, 1, 0, 0, 0, [], 1.0, 1.0, 0.0)))
    target.lose(0)
    target.state.identities = ModelIdentities()  # as after a reload
    actions = target.make_ready(0, OTHER)
    assert [one.error.code for one in actions if isinstance(one, EndStream)] == ["model_replaced"]
