"""The questions by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from outrider_lab.simulation.questions import edge, load, mix, shared_draft, standby
from outrider_lab.simulation.questions.answer import Answer
from outrider_lab.simulation.questions.asked import Asked
from outrider_lab.simulation.run import SimulationError

QUESTIONS: Final[Mapping[str, Callable[[Asked], Answer]]] = {
    "edge": edge.answer,
    "shared-draft": shared_draft.answer,
    "standby": standby.answer,
    "mix": mix.answer,
    "load": load.answer,
}


def answer_question(name: str, asked: Asked) -> Answer:
    """Answer a question. Raises SimulationError for a name that is none."""
    if name not in QUESTIONS:
        raise SimulationError(f"--question {name}: there is none of that name; there is {', '.join(QUESTIONS)}")
    return QUESTIONS[name](asked)
