"""Prompts for measuring what speculation brings. No head is trained on them, nor on their templates or topics."""

from collections.abc import Mapping, Sequence

from model_runner.training.prompts import Prompt, passages
from model_runner.training.topics import DOCUMENTED

_DOCUMENTED = ("abc", "array", "binascii", "bz2", "cmd", "colorsys", "dis", "fileinput", "gettext", "hashlib")

_BY_KIND: Mapping[str, Sequence[str]] = {
    "knowledge": (
        "How do volcanoes erupt?",
        "What caused the fall of the Berlin Wall?",
        "Tell me about the life of Marie Curie.",
        "How does a microwave oven heat food?",
        "Why is the sky blue and the sunset red?",
        "Which rivers flow through South America?",
        "Who was Cleopatra, and what is she remembered for?",
        "What happens in the body when somebody has a fever?",
        "How do submarines dive and surface again?",
        "What is the difference between weather and climate?",
        "In what way do glaciers shape a landscape?",
        "How is paper made?",
    ),
    "writing": (
        "Compose a travel review of an imaginary hotel in Iceland.",
        "Draft a speech for the opening of a new playground.",
        "I need an advertisement for a second-hand piano.",
        "Please write a complaint to an airline that lost my luggage.",
        "Compose a haiku sequence on autumn leaves.",
        "Tell a bedtime tale with a hedgehog and a snail in it.",
        "Draft an invitation to a neighbourhood barbecue.",
        "Pretend to be a pirate and describe your day.",
        "Continue: It was the third time this week that the elevator stopped between floors.",
        "Write the product description of an umbrella that never turns inside out.",
    ),
    "code": (
        "Implement a least-recently-used cache in Python.",
        "How can I find all anagrams in a word list with Python?",
        "Here is my code: `for i in range(len(xs)): print(xs[i])`. How would you improve it?",
        "Create an HTML page with a form for name and age.",
        "Explain this regular expression: ^[a-z0-9_-]{3,16}$",
        "Write a Kotlin class for a bank account with deposit and withdrawal.",
        "Which sorting algorithm would you choose for a million integers?",
        "Translate this Python code to Ruby: print([x * x for x in range(10) if x % 2])",
    ),
    "reasoning": (
        "A farmer's 17 sheep are in a field; all but 9 run away. How many stay? Show your reasoning.",
        "If a cyclist rides 45 kilometres in 3 hours, what is her average speed?",
        "Yesterday was two days before Monday. Which day is it now?",
        "Sort these numbers from large to small: 12, 5, 93, 47, 8, 61.",
        "A rectangle is 8 metres long and 5 metres wide. Work out its area and perimeter.",
        "Half of a number plus seven is fifteen. Find the number.",
    ),
    "advice": (
        "My flatmate never washes the dishes. How can I bring it up?",
        "Recommend a weekend plan for a family that visits Lisbon.",
        "Could you propose a vegetarian dinner for six guests?",
        "What ought I to check before buying a used motorcycle?",
        "How can I teach my parrot to speak?",
        "Is it worth repairing a ten-year-old washing machine?",
        "Suggest how a shy person can enjoy a wedding among strangers.",
        "I spilt red wine on a carpet. What now?",
    ),
    "rewriting": (
        "Put this into the past tense: The ferry crosses the bay twice a day and carries forty cars.",
        "Expand these notes into a paragraph: museum visit, lost ticket, kind guard, dinosaur hall, rain.",
        "Fix the spelling: Teh libary oppens at nien oclock on wensdays.",
        "Say this politely: Move your van, it blocks my garage.",
        "Into Dutch, please: The lamp on the landing is broken and the stairs are dark.",
    ),
}

_PASSAGE_REQUESTS = (
    "Give the gist of the passage below in two sentences.\n\n{}",
    "Here is a reference text. Write a friendly introduction to it for newcomers.\n\n{}",
)


def held_out_prompts() -> dict[str, list[Prompt]]:
    """The prompts by kind; the kinds `passage` and `plain` use docstrings that no training prompt has."""
    trained = set(passages(DOCUMENTED))
    found = [text for text in passages(_DOCUMENTED) if text not in trained]
    chosen = found[:: len(found) // 16][:16]
    prompts = {kind: [Prompt(text) for text in texts] for kind, texts in _BY_KIND.items()}
    prompts["passage"] = [Prompt(_PASSAGE_REQUESTS[i % 2].format(text)) for i, text in enumerate(chosen[::2])]
    prompts["plain"] = [Prompt(" ".join(text.split(" ")[:24]), "plain") for text in chosen[1::2]]
    return prompts
