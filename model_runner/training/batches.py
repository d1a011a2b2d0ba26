"""Which examples each training step sees."""

import random
from collections.abc import Iterator, Sequence

from model_runner.training.examples import Example


def batches(examples: Sequence[Example], rows: int, seed: int) -> Iterator[list[Example]]:
    """Endless, each with about `rows` tokens of answers; every pass has an order of its own.

    The n-th batch depends on the arguments alone, so training that is resumed sees what it would have seen.
    """
    source = random.Random(seed)
    batch: list[Example] = []
    held = 0
    while True:
        for index in source.sample(range(len(examples)), len(examples)):
            batch.append(examples[index])
            held += examples[index].num_answer
            if held >= rows:
                yield batch
                batch, held = [], 0
