"""Answers with the target's hidden states beside them, in files next to those of the answers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from model_runner.batch import IntArray
from model_runner.models.features import Feature
from model_runner.training.answers import Answer, AnswerStore
from model_runner.training.target import TargetForTraining

Float16Array = npt.NDArray[np.float16]
_LIMITS = np.finfo(np.float16)


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its answer. Features are read from disk when they are used."""

    tokens: IntArray  # [T]
    num_prompt: int
    temperature: float
    features: Mapping[Feature, Float16Array]  # each [T, hidden]
    start: int = 0
    """The position of the first token, where this is not a sequence from its beginning."""

    @property
    def num_answer(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.num_prompt


class ExampleStore:
    """A folder with a file for each feature of each file of answers: float16, clipped to its range."""

    def __init__(self, folder: Path, answers: AnswerStore, needs: Collection[Feature]) -> None:
        self._folder = folder
        self._answers = answers
        self._needs = needs
        folder.mkdir(parents=True, exist_ok=True)

    def compute(
        self, num_shards: int, target: Callable[[], TargetForTraining], progress: Callable[[int], None]
    ) -> None:
        """Run the target over the answers whose files are missing. `progress` is told the files that are done."""
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


def _example(answer: Answer, stored: Mapping[Feature, Float16Array], start: int) -> Example:
    features = {name: rows[start : start + len(answer.tokens)] for name, rows in stored.items()}
    return Example(np.array(answer.tokens, dtype=np.int64), answer.num_prompt, answer.temperature, features)
