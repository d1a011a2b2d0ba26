"""A file of answers with the versions that made them, and the differences of two files.

JSON keeps every bit of a number: Python writes the shortest decimal that reads back as the same float.
"""

import json
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

FORM = 1
"""Version of the file's form."""
_LIBRARIES = ("torch", "transformers", "numpy", "tokenizers", "llguidance")
_VOLATILE = frozenset({"id", "created", "model", "system_fingerprint", "usage", "warnings", "object", "template_date"})
"""Properties of an answer that other runs may change."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The answers of a commit."""

    header: Mapping[str, Any]
    models: Mapping[str, str]
    """Digests of the models' files, by name."""
    answers: Mapping[str, Mapping[str, Any]]
    """By model and by request."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises ValueError if it has another form."""
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("form") != FORM:
            raise ValueError(f"{path} has the form {content.get('form')}, not {FORM}: record it again")
        return cls(content["header"], content["models"], content["answers"])

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"form": FORM, **asdict(self)}, indent=0) + "\n", encoding="utf-8")

    def only(self, names: Sequence[str]) -> Self:
        """The answers of these models."""
        models = {name: digest for name, digest in self.models.items() if name in names}
        return type(self)(self.header, models, {name: self.answers[name] for name in models})

    @property
    def num_answers(self) -> int:
        return sum(map(len, self.answers.values()))

    @property
    def num_failed(self) -> int:
        """Requests that were not answered with status 200."""
        return sum(answer["status"] != 200 for answers in self.answers.values() for answer in answers.values())

    def failures(self) -> Iterator[str]:
        """A line for each reason for which requests to a model failed, with the first such request."""
        for model, answers in self.answers.items():
            reasons: dict[str, list[str]] = {}
            for request, answer in answers.items():
                if answer["status"] != 200:
                    reasons.setdefault(f"{answer['status']} {answer['error']['message']}", []).append(request)
            for reason, requests in reasons.items():
                yield f"{model}: {len(requests)} of {len(answers)} failed, the first is {requests[0]!r}: {reason}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two answers to a request differ."""

    model: str
    request: str
    place: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.model} / {self.request}: {self.place}: {_brief(self.before)} -> {_brief(self.after)}"


def header_of(isa: str) -> dict[str, Any]:
    """The commit, the processor, the instruction set and the libraries that make the answers."""
    return {
        "commit": _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "isa": isa,
        "processor": _processor(),
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def content_of(status: int, body: Any) -> dict[str, Any]:
    """The parts of an answer that the same request always gets."""
    if status != 200:
        return {"status": status, "error": body.get("error", body)}
    return {"status": status, **{name: value for name, value in body.items() if name not in _VOLATILE}}


def differences(before: Recording, after: Recording) -> list[Difference]:
    """The first difference of each request, in the order of the recording before. Files of models are compared, too."""
    found = []
    for model in {**before.models, **after.models}:
        digests = before.models.get(model), after.models.get(model)
        if digests[0] != digests[1]:
            found.append(Difference(model, "its files", "digest", *digests))
            continue
        old, new = before.answers.get(model, {}), after.answers.get(model, {})
        for request in {**old, **new}:
            pair = first_difference(old.get(request), new.get(request))
            if pair is not None:
                found.append(Difference(model, request, *pair))
    return found


def first_difference(before: Any, after: Any, place: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two values differ, with what stands there; None if they are equal in every bit."""
    if isinstance(before, dict) and isinstance(after, dict) and list(before) == list(after):
        pairs = [(f"{place}.{name}" if place else name, before[name], after[name]) for name in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(f"{place}[{index}]", *pair) for index, pair in enumerate(zip(before, after, strict=True))]
    else:
        return None if type(before) is type(after) and before == after else (place or "answer", before, after)
    return next((found for name, *pair in pairs if (found := first_difference(*pair, place=name)) is not None), None)


def report(before: Recording, after: Recording, found: Sequence[Difference], limit: int = 40) -> Iterator[str]:
    """Lines for a reader: what has changed around the answers, then differences by model."""
    for name in {**before.header, **after.header}:
        old, new = before.header.get(name), after.header.get(name)
        yield f"{name:13} {old}" if old == new else f"{name:13} {old} -> {new}"
    by_model: dict[str, list[Difference]] = {}
    for one in found:
        by_model.setdefault(one.model, []).append(one)
    for model, of_model in by_model.items():
        yield f"\n{model}: {len(of_model)} of {len(before.answers.get(model, ()))} answers differ"
        yield from (f"  {one}" for one in of_model[:limit])
        if len(of_model) > limit:
            yield f"  and {len(of_model) - limit} more"
    yield f"\n{after.num_answers} answers of {len(after.models)} models: " + (
        f"{len(found)} differ" if found else "all equal"
    )


def _brief(value: Any, limit: int = 120) -> str:
    """Numbers with all digits; longer values by their beginning."""
    text = json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
