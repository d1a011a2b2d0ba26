"""Traffic whose subject changes: general questions, then programs, then JSON records.

Templates and topics are only in this file, so no heads are trained on them.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

_TOPICS = (
    *("lighthouses", "the Suez Canal", "hot-air balloons", "sourdough starters", "bagpipes", "the Great Barrier Reef"),
    *("windmills", "the tango", "hummingbirds", "sundials", "the Black Death", "porcelain", "avalanches", "kayaks"),
    *("the Rosetta Stone", "cheese making", "fireflies", "the abacus", "tea ceremonies", "sandstorms", "violins"),
    *("moss", "the Orient Express", "sign language", "amber", "hedgehogs", "the Inca roads", "kaleidoscopes"),
)
_QUESTIONS = (
    "What should a curious traveller know of {}?",
    "Which three facts on {} surprise most people?",
    "Help me prepare a museum label for {}.",
    "My grandmother asks me about {}. What can I tell her?",
    "What went wrong in the early history of {}?",
    "Argue for and against spending public money on {}.",
)
_TASKS = (
    *(
        "rounds prices up to the next five cents",
        "renames all photos in a folder by date",
        "draws a chessboard as text",
    ),
    *("splits a bill among friends", "keeps the ten most recent searches", "converts Roman numerals to integers"),
    *(
        "finds gaps in a list of ticket numbers",
        "rolls dice and counts the sums",
        "turns minutes into hours and minutes",
    ),
    *(
        "shortens a text to a number of words",
        "tells whether two time slots overlap",
        "picks a winner among raffle tickets",
    ),
    *(
        "computes the median of sensor readings",
        "swaps the keys and values of a mapping",
        "masks all but the last digits",
    ),
    *("estimates reading time", "checks that brackets are balanced", "lists the leap years of a century"),
)
_PROGRAMS = (
    "In Python, I need a function that {}. With type hints, please.",
    "Show me a small Python program that {}, and a test of it.",
    "Refine this idea into Python code: something that {}.",
    "As a code reviewer, write the version that you would accept of a Python class that {}.",
)
_THINGS = (
    *(
        "a ferry timetable",
        "a hospital ward",
        "a coffee order",
        "a chess tournament",
        "a parcel in transit",
        "a bookshop",
    ),
    *(
        "a weather station",
        "a bicycle hire",
        "a film festival",
        "a bakery's stock",
        "a flight booking",
        "a zoo's animals",
    ),
    *("a marathon's results", "a vineyard", "a car repair", "a library loan", "a concert tour", "an apartment listing"),
)
_RECORDS = (
    'Give me sample data for {}: a JSON array of objects with the keys "id", "name", "status" and "amount".',
    'Answer with JSON only: five entries for {}, each with "id", "title", "tags" and "updated_at".',
    'Make up a JSON object that describes {}, with an "items" array of objects with "id", "label" and "price".',
)
SUBJECTS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "questions": (_QUESTIONS, _TOPICS),
    "programs": (_PROGRAMS, _TASKS),
    "records": (_RECORDS, _THINGS),
}
"""Templates and the topics that are inserted into them, by subject."""
_ASIDES = (
    "",
    " Keep it short.",
    " Take your time.",
    " I am in a hurry.",
    " Be precise.",
    " Imagine that I am ten.",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A request."""

    number: int
    subject: str
    text: str
    max_tokens: int
    temperature: float
    seed: int

    def body(self, model: str) -> dict[str, object]:
        """The body of a streamed chat completion."""
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def make_questions(
    count: int, turn: int, subjects: Sequence[str], lengths: tuple[int, int], seed: int
) -> list[Question]:
    """Make questions, with about the same number of consecutive turns for each subject; every other one is greedy.

    Args:
        count: number of questions.
        turn: number of questions in a turn.
        subjects: the subjects in order.
        lengths: minimum and maximum tokens of an answer.
        seed: determines the questions and their seeds.
    """
    source = random.Random(seed)
    makers = {subject: _maker(source, *SUBJECTS[subject]) for subject in subjects}
    spans = turns(count, turn)
    of_each = [subjects[number * len(subjects) // len(spans)] for number, span in enumerate(spans) for _ in span]
    return [
        Question(
            number=number,
            subject=subject,
            text=makers[subject](),
            max_tokens=source.randint(*lengths),
            temperature=0.7 if number % 2 else 0.0,
            seed=source.getrandbits(32),
        )
        for number, subject in enumerate(of_each)
    ]


def turns(count: int, turn: int) -> list[range]:
    """The range of answers in each turn; the last may be shorter."""
    return [range(start, min(start + turn, count)) for start in range(0, count, turn)]


def _maker(source: random.Random, templates: Sequence[str], topics: Sequence[str]) -> Callable[[], str]:
    """Make a function that draws questions without repetition until all are used."""
    left: list[str] = []

    def make() -> str:
        if not left:
            pairs = product(templates, topics, _ASIDES)
            left.extend(template.format(topic) + aside for template, topic, aside in pairs)
            source.shuffle(left)
        return left.pop()

    return make
