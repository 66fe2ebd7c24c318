"""What the target is asked. A prompt follows from its number alone, so that a run can go on where it stopped.

Three kinds, in turn, unless somebody gives prompts or texts of their own:

- The target writes the question itself, behind the head of a user's turn (as in Magpie, arXiv 2406.08464).
- A question composed of words that stand in `topics`.
- A task over a text that the target wrote before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

TOPICS = """
volcanoes|the water cycle|honey bees|old lighthouses|electric cars|solar panels|chess openings|
bread baking|the Roman roads|medieval castles|public libraries|city trams|coral reefs|migrating birds|
sourdough|tea ceremonies|marathon training|sleep and health|vitamins|the human heart|vaccines|
antibiotics|photosynthesis|black holes|the Moon|Mars missions|weather satellites|tides|earthquakes|
glaciers|rain forests|deserts|wind turbines|nuclear fusion|batteries|semiconductors|databases|
computer networks|encryption|sorting algorithms|recursion|unit tests|web browsers|search engines|
machine translation|neural networks|robots in factories|3D printing|bridges|skyscrapers|canals|railways|
bicycles|sailing boats|airships|maps|compasses|clocks|the printing press|newspapers|radio plays|
silent films|jazz|string quartets|folk songs|watercolours|pottery|knitting|gardening|compost|
apple trees|vineyards|coffee|chocolate|cheese|spices|street markets|small businesses|interest rates|
inflation|insurance|taxes|savings|job interviews|remote work|team meetings|time management|
public speaking|negotiation|friendship|family dinners|raising a puppy|house cats|horses|wolves|whales|
octopuses|ants|butterflies|mushrooms|oak trees|soil|rivers|mountain huts|camping|fishing|skiing|
football|table tennis|swimming lessons|yoga|stress|kindness|honesty|courage|democracy|constitutions|
trade unions|the Silk Road|the Renaissance|the Industrial Revolution|ancient Egypt|Greek myths|
fairy tales|detective stories|science fiction|poetry|letters|diaries|museums|school uniforms|homework|
languages|dictionaries|sign language|music lessons|hospitals|nurses|firefighters|bakers|carpenters|
pilots|astronauts|teachers|farmers|a lost umbrella|a night train|an old map|a broken clock|
a garden party|a new neighbour|a rainy Sunday|a birthday cake|a paper boat|a quiet harbour
""".replace("\n", "").split("|")
PLACES = """
Lisbon|Nairobi|Kyoto|Oslo|Lima|Cairo|Hanoi|Quebec|Vienna|Dublin|Jakarta|Accra|Prague|Seoul|Quito|
Tunis
""".replace("\n", "").split("|")
NAMES = """
Amara|Bjorn|Chidi|Dalia|Elif|Farid|Greta|Hugo|Ines|Jonas|Keiko|Luca|Mina|Noor|Otto|Priya|Rosa|
Sven
""".replace("\n", "").split("|")
ROLES = """
a patient teacher|a ship's captain|a museum guide|a travel agent|a doctor|a detective|a poet|a gardener|
a chef|a judge|a sports reporter|a librarian|a software engineer|a historian|a wise grandmother|a robot
""".replace("\n", "").split("|")
LANGUAGES = """
French|German|Spanish|Italian|Portuguese|Dutch
""".replace("\n", "").split("|")
PROGRAMS = """
reverses a string|checks whether a number is prime|counts the words in a text|merges two sorted lists|
finds the largest number in a list|computes the factorial of a number|removes duplicates from a list|
checks whether a word is a palindrome|converts Celsius to Fahrenheit|computes Fibonacci numbers|
finds the longest common prefix of some words|sorts a list of dictionaries by a key|
reads a CSV file and sums a column|validates an e-mail address|rotates a matrix|implements a stack|
implements binary search|counts vowels|groups words by their first letter|parses a date|
simulates a dice roll|computes the greatest common divisor|flattens a nested list|generates a random password
""".replace("\n", "").split("|")
GOODS = """
apples|pencils|tickets|books|eggs|candles|marbles|stamps|bottles|chairs|oranges|postcards|tiles|
ropes
""".replace("\n", "").split("|")
Kind = Literal["own", "composed", "over_text", "given"]
KINDS: tuple[Kind, ...] = ("own", "composed", "own", "over_text")

_ABOUT = (
    "Explain {topic} to a child.",
    "Write a short essay about {topic}.",
    "What are three interesting facts about {topic}?",
    "Write a short story about {topic} in which {name} plays a part.",
    "What is the history of {topic}?",
    "Why do people care about {topic}?",
    "List five tips about {topic} for a beginner.",
    "Compare {topic} and {other}.",
    "Write a poem about {topic}.",
    "Write a blog post about {topic}, written from {place}.",
    "Write an email to {name} about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Give me a step by step plan to learn about {topic}.",
    "Pretend to be {role} and tell me about {topic}.",
    "You are {role} in {place}. {name} asks you about {topic}. What do you say?",
    "Is it true that {topic} changed the world? Argue for it and against it.",
    "Write a dialogue between {name} and {role} about {topic}.",
    "Describe {topic} in one paragraph, then in one sentence.",
    "What would happen without {topic}?",
    "Design a lesson for twelve-year-olds about {topic}.",
    "Who is known for {topic}, and when did it begin?",
    "How does {topic} work?",
    "Write a product description that mentions {topic}.",
    "Make a table with three columns about {topic} and {other}.",
    "Answer shortly: what is {topic}?",
)
_OTHERS = (
    "Write a Python function that {program}. Explain how it works.",
    "Write a {programming} program that {program}.",
    "Translate into {language}: {name} went to {place} to learn about {topic}.",
    "How do I say 'I would like to know more about {topic}' in {language}?",
    "What is the capital of the country that {place} is in?",
    "Plan three days in {place} for someone who likes {topic}.",
    "{name} has {a} {goods} and buys {b} more. Then {name} gives a third of them to a friend. "
    "How many {goods} are left?",
    "A box holds {a} {goods}. {name} fills {b} boxes and sells each of the {goods} for ${c}. How much money is that?",
    "{name} drives {a} km at {b} km/h and then {c} km at twice that speed. How long does it take?",
    "Solve for x: {a}x + {b} = {c}. Show each step.",
    "{name} earns ${a} an hour and works {b} hours a week. A quarter of it is saved. How much is that in {c} weeks?",
    "In a class of {a} pupils, {c} percent like {topic}. How many pupils are that? Think step by step.",
    "Correct the grammar: {name} have went to {place} for to see the {goods} but they was not there.",
    "Classify as positive or negative: 'The {goods} from {place} were late, but {name} loved them.'",
)
_OVER_TEXT = (
    "Summarize: {text}",
    "Summarise the following text in two sentences.\n\n{text}",
    "{text}\n\nTL;DR:",
    "Translate into {language}:\n\n{short}",
    "Translate {language} to English: {short}",
    "Use the following passage to answer the question.\n\nPassage: {text}\n\nQuestion: What is it about, and why does "
    "it matter?",
    "Context information is below.\n---\n{text}\n---\nGiven the context information, answer the query.\nQuery: what "
    "does it say about {topic}?\nAnswer:",
    "Rewrite this text so that it is easier to read:\n\n{text}",
    "List the key points of this text as bullets.\n\n{text}",
    "Extract every name and number from this text as JSON.\n\n{text}",
    "Read this and continue it with one more paragraph.\n\n{text}",
    "Correct the mistakes in this text and write the whole text again.\n\n{text}",
)
_LONG_WORDS, _SHORT_WORDS = 120, 25  # of a text that a prompt is about. Not tuned.
# Not tuned: ADR 0087 counts the target's first choice also where it sampled.
_GREEDY_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Wish:
    """A conversation to have. `text` is what the user says, "" where the target is to write that itself.

    `temperature` is for the answer.
    """

    number: int
    kind: Kind
    text: str
    temperature: float


class Wishes(Protocol):
    """Conversations by their numbers. `texts`: some that the target wrote (may be empty)."""

    def __call__(self, number: int, seed: int, texts: Sequence[str]) -> Wish: ...


def wish_given(prompts: Sequence[str]) -> Wishes:
    """Return conversations that begin with these prompts in turn: answered greedily, and from the second time on
    sampled."""

    def wish_one(number: int, seed: int, texts: Sequence[str]) -> Wish:
        return Wish(number, "given", prompts[number % len(prompts)], 0.0 if number < len(prompts) else 0.7)

    return wish_one


def wish_over(documents: Sequence[str]) -> Wishes:
    """Return conversations that ask for something over pieces of these texts."""
    pieces = [piece for document in documents for piece in _cut_pieces(document)]

    def wish_one(number: int, seed: int, texts: Sequence[str]) -> Wish:
        rng = random.Random(f"{seed}-{number}")  # noqa: S311  # variety, not secrecy
        text = rng.choice(_OVER_TEXT).format(**_words(rng), **_cuts(pieces[number % len(pieces)]))
        return Wish(number, "over_text", text, 0.0 if rng.random() < _GREEDY_SHARE else 0.7)

    return wish_one


def _cut_pieces(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[start : start + _LONG_WORDS]) for start in range(0, len(words), _LONG_WORDS)]


def wish(number: int, seed: int, texts: Sequence[str]) -> Wish:
    """Return the conversation of this number; `texts` are some that the target wrote (may be empty)."""
    rng = random.Random(f"{seed}-{number}")  # noqa: S311  # variety, not secrecy
    kind = KINDS[number % len(KINDS)]
    if kind == "over_text" and not texts:
        kind = "composed"
    temperature = 0.0 if rng.random() < _GREEDY_SHARE else 0.7
    makers: dict[Kind, Callable[[], str]] = {
        "own": lambda: "",
        "composed": lambda: rng.choice(_ABOUT if rng.random() < 0.6 else _OTHERS).format(**_words(rng)),
        "over_text": lambda: rng.choice(_OVER_TEXT).format(**_words(rng), **_cuts(rng.choice(texts))),
    }
    return Wish(number, kind, makers[kind](), temperature)


def _words(rng: random.Random) -> dict[str, object]:
    topic, other = rng.sample(TOPICS, 2)
    return {
        "topic": topic,
        "other": other,
        "place": rng.choice(PLACES),
        "name": rng.choice(NAMES),
        "role": rng.choice(ROLES),
        "language": rng.choice(LANGUAGES),
        "program": rng.choice(PROGRAMS),
        "programming": rng.choice(("JavaScript", "C", "Java", "Bash", "SQL", "Rust")),
        "goods": rng.choice(GOODS),
        "a": rng.randint(3, 90),
        "b": rng.randint(2, 40),
        "c": rng.randint(5, 95),
    }


def _cuts(text: str) -> dict[str, str]:
    words = text.split(" ")
    return {"text": " ".join(words[:_LONG_WORDS]), "short": " ".join(words[:_SHORT_WORDS])}
