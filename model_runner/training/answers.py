"""A model's own answers, in numbered files, so that an interrupted run goes on where it was."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import Protocol

import numpy as np

from model_runner.contract import SamplingParams
from model_runner.training.held_out import held_out_prompts
from model_runner.training.prompts import Prompt, training_prompts

SHARD = 64
"""Answers in a file."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how it is to be answered."""

    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int = 256
    """Of the answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Prompt and answer as tokens; no tokens if the prompt was too long, or there was none."""

    tokens: tuple[int, ...]
    num_prompt: int
    temperature: float


class Answerer(Protocol):
    """Something that runs the model."""

    def answers(self, questions: Iterator[Question]) -> Generator[tuple[int, Answer]]:
        """Each answer with the number of its question, in the order in which they end.

        Takes questions as it has room for them; nothing is left running when the generator is closed.
        """
        ...


def training_questions(own: Sequence[Prompt] = ()) -> Iterator[Question]:
    """Endless. Temperatures alternate; every question has its own seed. `own` are prompts that the model made."""
    for index, (prompt, temperature) in enumerate(zip(training_prompts(own), cycle((0.0, 0.7, 1.0)), strict=False)):
        yield Question(prompt, SamplingParams(temperature=temperature, seed=index))


def held_out_questions() -> Iterator[Question]:
    """Every held-out prompt at temperatures 0 and 1."""
    prompts = [prompt for group in held_out_prompts().values() for prompt in group]
    for index, prompt in enumerate(prompts):
        yield Question(prompt, SamplingParams(temperature=0.0, seed=index))
        yield Question(prompt, SamplingParams(temperature=1.0, seed=index))


@dataclass(slots=True)
class _Count:
    """Tokens that were made, of those that are wanted."""

    held: int
    wanted: int | None
    progress: Callable[[int], None]

    def add(self, made: int) -> None:
        self.held += made
        self.progress(self.held)

    @property
    def suffice(self) -> bool:
        return self.wanted is not None and self.held >= self.wanted


class AnswerStore:
    """A folder with files of SHARD answers each; what they hold depends on the questions alone."""

    def __init__(self, folder: Path, questions: Callable[[], Iterator[Question]]) -> None:
        self._folder = folder
        self._questions = questions
        folder.mkdir(parents=True, exist_ok=True)

    def collect(self, answerer: Callable[[], Answerer], num_tokens: int | None, progress: Callable[[int], None]) -> int:
        """Have questions answered until the files from the first on hold `num_tokens` tokens of answers.

        None has all questions answered. The answerer is made only if any answers are missing. Returns the number of
        files to use, which is the same after any number of interruptions. `progress` is told the tokens so far.
        """
        held = 0
        for shard in count():
            progress(held)
            if num_tokens is not None and held >= num_tokens:
                return shard
            if not self._file(shard).is_file():
                return shard + self._generate(answerer, shard, _Count(held, num_tokens, progress))
            held += self._num_answer_tokens(shard)
        raise AssertionError("there is no last shard")

    def read(self, shard: int) -> list[Answer]:
        """The answers of a file, without the empty ones."""
        with np.load(self._file(shard)) as data:
            columns = [data[name] for name in ("tokens", "lengths", "prompts", "temperatures")]
        tokens, lengths, prompts, temperatures = columns
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        return [
            Answer(tuple(part.tolist()), int(prompt), float(temperature))
            for part, prompt, temperature in zip(parts, prompts, temperatures, strict=True)
            if len(part) > prompt
        ]

    def _generate(self, answerer: Callable[[], Answerer], first: int, tokens: "_Count") -> int:
        """Make files from the first missing one on; returns how many."""
        questions = islice(self._questions(), first * SHARD, None)
        if (question := next(questions, None)) is None:
            return 0
        waiting: dict[int, Answer] = {}
        shard = first
        with closing(answerer().answers(chain([question], questions))) as finished:
            for number, answer in finished:
                waiting[first * SHARD + number] = answer
                while all(index in waiting for index in _numbers(shard)):
                    tokens.add(self._write(shard, [waiting.pop(index) for index in _numbers(shard)]))
                    shard += 1
                    if tokens.suffice:
                        return shard - first
        if waiting:
            self._write(shard, [waiting[index] for index in sorted(waiting)])
            shard += 1
        return shard - first

    def _write(self, shard: int, answers: list[Answer]) -> int:
        """Returns the tokens of the answers."""
        partial = self._file(shard).with_suffix(".partial.npz")
        np.savez(
            partial,
            tokens=np.array([token for answer in answers for token in answer.tokens], dtype=np.int32),
            lengths=np.array([len(answer.tokens) for answer in answers], dtype=np.int32),
            prompts=np.array([answer.num_prompt for answer in answers], dtype=np.int32),
            temperatures=np.array([answer.temperature for answer in answers]),
        )
        partial.replace(self._file(shard))
        return self._num_answer_tokens(shard)

    def _num_answer_tokens(self, shard: int) -> int:
        return sum(len(answer.tokens) - answer.num_prompt for answer in self.read(shard))

    def _file(self, shard: int) -> Path:
        return self._folder / f"answers-{shard:05d}.npz"


def _numbers(shard: int) -> range:
    return range(shard * SHARD, (shard + 1) * SHARD)
