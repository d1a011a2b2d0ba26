"""What to send: prompts of given lengths with a given share in common, the same for the same seed."""

import random
from dataclasses import dataclass

Prompt = str | list[int]

WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name president team minute idea body information
""".split()  # noqa: SIM905  (a hundred quoted lines would hide the rest of the file)
"""Common words: nearly every tokenizer has one token for each, with the space before it."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform over low to high, both included; fixed where they are equal."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read `128` or `64:256`. Raises ValueError."""
        low, _, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            raise ValueError(f"expected a length such as 128 or a range such as 64:256, got {text!r}") from None
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"expected 1 <= low <= high, got {text!r}")
        return lengths

    def sample(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of a load."""

    num_requests: int
    input_len: Lengths
    """Tokens, or words where token ids cannot be sent."""
    output_len: Lengths
    """Tokens that each request may generate at most."""
    shared_prefix: float = 0.0
    """Share of each prompt, from its start, that all prompts have in common, 0 to 1."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send."""

    prompt: Prompt
    max_tokens: int


def make_requests(workload: Workload, vocab_size: int | None) -> list[LoadRequest]:
    """All requests of the load: random token ids below `vocab_size`, random words where it is None."""
    rng = random.Random(workload.seed)
    common = _units(rng, workload.input_len.high, vocab_size)
    requests = []
    for _ in range(workload.num_requests):
        length = workload.input_len.sample(rng)
        shared = round(length * workload.shared_prefix)
        units = common[:shared] + _units(rng, length - shared, vocab_size)
        prompt: Prompt = units if vocab_size is not None else " ".join(WORDS[unit] for unit in units)
        requests.append(LoadRequest(prompt, workload.output_len.sample(rng)))
    return requests


def _units(rng: random.Random, count: int, vocab_size: int | None) -> list[int]:
    """Token ids, or indices of words."""
    return rng.choices(range(len(WORDS) if vocab_size is None else vocab_size), k=count)
