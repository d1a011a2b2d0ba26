"""Training data: answers of the model, and files with the target's hidden states for them."""

import random
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, count, cycle, islice
from pathlib import Path

import numpy as np
from torch import Tensor

from model_runner.batch import prompt_batch
from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams
from model_runner.features import Feature
from model_runner.heads.base import Example, Float16Array
from model_runner.platforms.choose import choose_platform
from model_runner.training.prompts import Prompt, held_out_prompts, training_prompts

SHARD = 64
"""Answers per file."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the settings for its answer."""

    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int = 256
    """Maximum length of the answer."""


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """Prompt and answer as tokens; no tokens if the prompt was too long or the answer empty."""

    tokens: tuple[int, ...]
    num_prompt: int
    temperature: float


AnswerQuestions = Callable[[Iterator[Question]], Generator[tuple[int, AnsweredPrompt]]]
"""Runs the model on questions. Yields each answer with its question's number, in the order in which they finish. It
takes questions as it has capacity. Closing the generator stops all running requests."""


def training_questions(own: Sequence[Prompt] = ()) -> Iterator[Question]:
    """Endless questions with alternating temperatures and different seeds. `own` are prompts that the model wrote."""
    for index, (prompt, temperature) in enumerate(zip(training_prompts(own), cycle((0.0, 0.7, 1.0)), strict=False)):
        yield Question(prompt, SamplingParams(temperature=temperature, seed=index))


def held_out_questions() -> Iterator[Question]:
    """Every held-out prompt, at temperatures 0 and 1."""
    prompts = [prompt for group in held_out_prompts().values() for prompt in group]
    for index, prompt in enumerate(prompts):
        yield Question(prompt, SamplingParams(temperature=0.0, seed=index))
        yield Question(prompt, SamplingParams(temperature=1.0, seed=index))


class AnswerStore:
    """A folder with files of SHARD answers each; their content depends only on the questions."""

    def __init__(self, folder: Path, questions: Callable[[], Iterator[Question]]) -> None:
        self._folder = folder
        self._questions = questions
        folder.mkdir(parents=True, exist_ok=True)

    def collect(
        self, start: Callable[[], AnswerQuestions], num_tokens: int | None, progress: Callable[[int], None]
    ) -> int:
        """Generate answers until the files hold `num_tokens` tokens of answers.

        None answers all questions. `start` loads the model, and is only called if answers are missing. `progress` gets
        the number of tokens so far. Returns the number of files to use, which does not depend on interruptions.
        """
        held, is_missing = 0, False
        with closing(self._generate(start)) as generated:
            for shard in count():
                progress(held)
                if num_tokens is not None and held >= num_tokens:
                    return shard
                is_missing = is_missing or not self._file(shard).is_file()
                if is_missing and next(generated, None) is None:
                    return shard
                held += sum(len(answer.tokens) - answer.num_prompt for answer in self.read(shard))
        raise AssertionError("there is no last shard")

    def read(self, shard: int) -> list[AnsweredPrompt]:
        """The answers of a file, without empty ones."""
        with np.load(self._file(shard)) as data:
            columns = [data[name] for name in ("tokens", "lengths", "prompts", "temperatures")]
        tokens, lengths, prompts, temperatures = columns
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        return [
            AnsweredPrompt(tuple(part.tolist()), int(prompt), float(temperature))
            for part, prompt, temperature in zip(parts, prompts, temperatures, strict=True)
            if len(part) > prompt
        ]

    def _generate(self, start: Callable[[], AnswerQuestions]) -> Generator[int]:
        """Generate files from the first missing one on; yields the number of each."""
        shard = first = next(shard for shard in count() if not self._file(shard).is_file())
        questions = islice(self._questions(), first * SHARD, None)
        if (question := next(questions, None)) is None:
            return
        waiting: dict[int, AnsweredPrompt] = {}
        with closing(start()(chain([question], questions))) as finished:
            for number, answer in finished:
                waiting[first * SHARD + number] = answer
                while all(index in waiting for index in _numbers(shard)):
                    self._write(shard, [waiting.pop(index) for index in _numbers(shard)])
                    yield shard
                    shard += 1
        if waiting:
            self._write(shard, [waiting[index] for index in sorted(waiting)])
            yield shard

    def _write(self, shard: int, answers: list[AnsweredPrompt]) -> None:
        partial = self._file(shard).with_suffix(".partial.npz")
        np.savez(
            partial,
            tokens=np.array([token for answer in answers for token in answer.tokens], dtype=np.int32),
            lengths=np.array([len(answer.tokens) for answer in answers], dtype=np.int32),
            prompts=np.array([answer.num_prompt for answer in answers], dtype=np.int32),
            temperatures=np.array([answer.temperature for answer in answers]),
        )
        partial.replace(self._file(shard))

    def _file(self, shard: int) -> Path:
        return self._folder / f"answers-{shard:05d}.npz"


def _numbers(shard: int) -> range:
    return range(shard * SHARD, (shard + 1) * SHARD)


_LIMITS = np.finfo(np.float16)


class TargetForTraining:
    """Computes hidden states of whole sequences, with the server's products and KV cache types."""

    def __init__(self, config: RunnerConfig, needs: Collection[Feature], max_tokens: int) -> None:
        """Loads the model; sequences have at most `max_tokens` tokens. Raises the errors of ModelRunner.load."""
        platform = choose_platform(config)
        self._block_size = config.block_size
        shape = platform.inspect(config.model)
        model = platform.load(config.model, shape)
        cache = platform.make_cache(shape.kv, -(-max_tokens // config.block_size), config.block_size)
        self._target = platform.make_target(model, platform.attention(cache), max_tokens, needs)

    def features(self, tokens: Sequence[int]) -> dict[Feature, Tensor]:
        """Each feature [T, hidden] of a sequence of T tokens, on the device."""
        batch = prompt_batch([tokens], self._block_size)
        batch = replace(batch, logits_index=batch.logits_index[-1:])  # the model requires at least one
        self._target.forward(batch)
        return dict(self._target.features())


class ExampleStore:
    """A folder with a float16 file for each feature of each file of answers, clipped to float16's range."""

    def __init__(self, folder: Path, answers: AnswerStore, needs: Collection[Feature]) -> None:
        self._folder = folder
        self._answers = answers
        self._needs = needs
        folder.mkdir(parents=True, exist_ok=True)

    def compute(
        self, num_shards: int, target: Callable[[], TargetForTraining], progress: Callable[[int], None]
    ) -> None:
        """Run the target on answers without feature files. `progress` gets the number of finished files."""
        missing = [shard for shard in range(num_shards) if not all(self._file(shard, n).is_file() for n in self._needs)]
        progress(num_shards - len(missing))
        if not missing:
            return
        model = target()
        for done, shard in enumerate(missing, num_shards - len(missing) + 1):
            self._write(shard, [model.features(answer.tokens) for answer in self._answers.read(shard)])
            progress(done)

    def read(self, shard: int) -> list[Example]:
        """The examples of a file of answers."""
        answers = self._answers.read(shard)
        stored: dict[Feature, Float16Array] = {n: np.load(self._file(shard, n), mmap_mode="r") for n in self._needs}
        starts = np.cumsum([0, *(len(answer.tokens) for answer in answers)])
        return [_example(answer, stored, int(start)) for answer, start in zip(answers, starts, strict=False)]

    def _write(self, shard: int, features: Sequence[Mapping[Feature, Tensor]]) -> None:
        for need in self._needs:
            rows = np.concatenate([one[need].float().cpu().numpy() for one in features])
            partial = self._file(shard, need).with_suffix(".partial.npy")
            np.save(partial, rows.clip(_LIMITS.min, _LIMITS.max).astype(np.float16))
            partial.replace(self._file(shard, need))

    def _file(self, shard: int, need: Feature) -> Path:
        return self._folder / f"features-{shard:05d}.{need}.npy"


def _example(answer: AnsweredPrompt, stored: Mapping[Feature, Float16Array], start: int) -> Example:
    features = {name: rows[start : start + len(answer.tokens)] for name, rows in stored.items()}
    return Example(np.array(answer.tokens, dtype=np.int64), answer.num_prompt, answer.temperature, features)


def batches(examples: Sequence[Example], rows: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches, each with about `rows` answer tokens; every pass has its own order.

    The n-th batch depends only on the arguments, so resumed training continues with the same batches.
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


OPENING = Prompt("", "opening")
MAX_TOKENS = 96
"""Longer questions are dropped."""
_SHORTEST = 12
"""Minimum number of characters of a question."""


def opening_questions(count: int) -> Iterator[Question]:
    """Requests that make the model write `count` questions, each with its own seed."""
    for index in range(count):
        yield Question(OPENING, SamplingParams(temperature=1.0, top_p=0.95, seed=index), MAX_TOKENS)


def own_prompts(answers: Iterable[AnsweredPrompt], decode: Callable[[Sequence[int]], str]) -> list[Prompt]:
    """The finished questions without duplicates, in the order of the answers."""
    ended = (answer for answer in answers if len(answer.tokens) - answer.num_prompt < MAX_TOKENS)
    texts = (decode(answer.tokens[answer.num_prompt :]).strip() for answer in ended)
    return [Prompt(text) for text in dict.fromkeys(texts) if len(text) >= _SHORTEST]
