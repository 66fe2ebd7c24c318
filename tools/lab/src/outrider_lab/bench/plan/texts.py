"""Requests for comparing predictions with decoding: of the same kinds as the texts that acceptance is measured on
(orchestrator/worker/measuring/prompts.py), and none of them."""

from __future__ import annotations

TEXTS = (
    "Explain in a few sentences why the sky is blue in the day and red in the evening.",
    "List the four seasons and two things that people often do in each of them.",
    "Write this again with every name replaced by 'the baker': Clara gave Tom the bread, and Clara thanked Tom for it.",
    "Write the beginning of a short story about a clockmaker whose clocks all stop at noon.",
    "Write a Python function that counts the vowels of a text, with a docstring.",
    "A shop sells pens at 3 for 2 euros. What do 12 pens cost? Show each step.",
    "Explain to a child how bread is made, from the field to the table.",
    "List five animals that live in the sea, with one sentence about each.",
    "Write this as a list: first wash the rice, then boil the water, then cook the rice for twelve minutes, then rest.",
    "Write a letter to a friend about a rainy week in the mountains.",
    "Write a Python function that turns a list of numbers around, without reversed().",
    "A tank holds 120 litres and loses 3 litres an hour. When is it half empty? Show each step.",
    "Explain why we see the lightning before we hear the thunder.",
    "List six things to pack for three days in the mountains, and why.",
    "Write this again as a polite question: Open the window, it is too warm in here.",
    "Write a short scene in which two old friends meet at a station.",
    "Write a Python function that counts how often each word occurs in a text.",
    "A box holds 24 eggs. How many boxes do 400 eggs need, and how full is the last one? Show each step.",
    "Explain to a new gardener why soil needs rest.",
    "Give five reasons to read every day, one sentence each.",
    "Write this in the future tense: The ship left the harbour and the children waved from the pier.",
    "Write a letter in which a baker thanks the village for its help after a fire.",
    "Write a Python class for a stopwatch that can be started, stopped and reset.",
    "Three friends share a bill of 48 euros so that one pays twice what each of the others pays. Who pays what?",
)

PASSAGE = (
    "The town stands where the river meets the sea, and for three hundred years its people lived from both. In the "
    "spring they mended nets and painted boats; in the summer they sailed before sunrise and came home with herring, "
    "cod and mackerel; in the autumn they smoked what they had not sold, and in the winter they built. The oldest "
    "house is the customs house beside the bridge, where every barrel was weighed and every sack was counted before "
    "it went up the river to the market towns. Its cellar was dug below the level of the tide, so that ice cut from "
    "the lakes in January kept until June. When the railway came, the barrels went by land and the customs house "
    "became a school. "
    "Each August the town holds a fair on the quay. There is a race of rowing boats from the bridge to the island "
    "and back, a prize for the longest plait of onions, and a table at which the oldest inhabitants tell the children "
    "how it was to unload a ship at night by the light of lanterns. "
)
"""What stands before a long prompt's question."""


def prompt_text(number: int, *, long: bool) -> str:
    """Return the text of a request; beyond the last it starts again."""
    text = TEXTS[number % len(TEXTS)]
    return f"{PASSAGE}\n\n{text}" if long else text
