"""Random answers to many JSON schemas: each ends, and fits its schema: `python -m bench.schemas`.

Schemas come from pydantic models in installed packages, from components of OpenAPI files (also in wheels), and from
JSON files that have schemas by name. An answer is drawn token by token among those that the engine's masks allow. It
looks for its end after a while. Schemas that can be enforced only in part may have invalid answers; the server reports
these parts, so such schemas are counted on their own.
"""

import argparse
import importlib
import json
import pkgutil
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from zipfile import ZipFile

import numpy as np
import yaml
from jsonschema import Draft4Validator, Draft202012Validator, ValidationError
from jsonschema.validators import validator_for
from pydantic import BaseModel, PydanticUserError
from pydantic.errors import PydanticInvalidForJsonSchema
from referencing.exceptions import Unresolvable
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from bench.engine_environment import use_engine_environment
from model_runner.hub.repository import resolve_model
from model_runner.sampling.grammar import Grammars
from server.generation.constraints.check import grammar_of
from server.generation.constraints.closing import CLOSED
from server.generation.constraints.fragment import ConstraintError
from server.generation.constraints.json_schema import JsonSchema
from server.generation.notices import Notice

PATIENCE, LIMIT = 150, 1_000
"""Tokens after which an answer looks for its end, and after which it is given up."""
RESULTS = ("valid", "valid, enforced in part", "refused", "cut off", "invalid, as reported", "INVALID", "FAILED")
OPENAPI = ("openapi", "swagger")

OLD = re.compile(r'"exclusiveM[a-z]+": (?:true|false)|"items": \[')

Named = Iterator[tuple[str, Any]]


def of_package(name: str) -> Named:
    """The schemas of all pydantic models in a package."""
    package = importlib.import_module(name)
    modules = [package]
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), f"{name}."):
        try:
            modules.append(importlib.import_module(found.name))
        except ImportError:  # it needs a package that is not installed
            continue
    models = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    for model in sorted(models, key=lambda one: f"{one.__module__}.{one.__qualname__}"):
        if issubclass(model, BaseModel) and model.__module__.startswith(name):
            try:
                yield f"{model.__module__}.{model.__qualname__}", model.model_json_schema()
            except (PydanticInvalidForJsonSchema, PydanticUserError, AttributeError, TypeError, ValueError):
                continue


def of_file(path: Path) -> Named:
    """The schemas in a file: by name, or the components of an OpenAPI file, also in a wheel."""
    if path.suffix == ".whl":
        with ZipFile(path) as wheel:
            for inside in wheel.namelist():
                if inside.endswith((".json", ".yaml", ".yml")):
                    yield from of_document(
                        f"{path.name.split('-')[0]}/{Path(inside).name}", wheel.read(inside).decode()
                    )
        return
    yield from of_document(path.name, path.read_text(encoding="utf-8"))


def of_document(name: str, text: str) -> Named:
    """The schemas in a document, or none if it is of another kind."""
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return
    if not isinstance(document, dict):
        return
    if not any(keyword in document for keyword in OPENAPI):
        if all(isinstance(schema, dict) for schema in document.values()):
            yield from ((f"{name}/{key}", schema) for key, schema in document.items())
        return
    kept = {key: document[key] for key in ("components", "definitions") if key in document}
    schemas = document.get("definitions") or document.get("components", {}).get("schemas", {})
    at = "definitions" if "definitions" in document else "components/schemas"
    for key in schemas:
        pointer = key.replace("~", "~0").replace("/", "~1")
        yield f"{name}/{key}", {"$ref": f"#/{at}/{pointer}", **kept}


def validator_of(schema: Any) -> Any:
    """The validator of a schema's draft; of draft 4, as in OpenAPI 3.0, if it has flags or tuples as that draft has."""
    is_old = OLD.search(json.dumps(schema)) is not None
    return validator_for(schema, default=Draft4Validator if is_old else Draft202012Validator)


class Bench:
    """Draws answers with the engine's grammars."""

    def __init__(self, folder: Path, seeds: int) -> None:
        """Draws `seeds` answers to each schema."""
        vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        find = partial((folder / "tokenizer.json").read_text, encoding="utf-8")
        self._grammars = Grammars(find, vocabulary)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._ends = tuple(self._grammars.vocabulary.tokenizer.eos_tokens)
        self._seeds = seeds
        ids = range(self._tokenizer.get_vocab_size())
        texts = {token: self._tokenizer.decode([token]) for token in ids}
        self._closing = np.array([token for token, text in texts.items() if text and not text.strip('"]}')])

    def result(self, schema: Any) -> tuple[str, str]:
        """One of RESULTS, the worst of all answers, and what is wrong."""
        notices: list[Notice] = []
        try:
            grammar = grammar_of(JsonSchema(schema, "schema", is_strict=False), "schema", notices)
        except ConstraintError as error:
            return "refused", str(error)
        is_partial = any(notice.reason != CLOSED for notice in notices)
        found = [self._answer(grammar, schema, seed, is_partial=is_partial) for seed in range(self._seeds)]
        return max(found, key=lambda one: RESULTS.index(one[0]))

    def _answer(self, grammar: str, schema: Any, seed: int, *, is_partial: bool) -> tuple[str, str]:
        text, failure = self._drawn(grammar, Random(seed))
        if failure:
            return "FAILED", f"{failure} after {(text or '')[-200:]!r}"
        if text is None:
            return "cut off", ""
        try:
            validator_of(schema)(schema).validate(json.loads(text))
        except (ValidationError, ValueError, Unresolvable) as error:
            return "invalid, as reported" if is_partial else "INVALID", f"{str(error)[:300]} in {text[:300]!r}"
        return "valid, enforced in part" if is_partial else "valid", ""

    def _drawn(self, grammar: str, random: Random) -> tuple[str | None, str]:
        """A random answer, or None if it found no end, and why its matcher failed, if it did."""
        matcher = self._grammars.matcher(grammar, self._ends, ())
        tokens: list[int] = []
        while len(tokens) < LIMIT:
            mask = matcher.mask()
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not len(allowed):
                return self._tokenizer.decode(tokens), f"no token left ({matcher.failure})"
            is_late = len(tokens) > PATIENCE
            is_end = np.isin(allowed, self._ends)
            if is_end.any() and (is_late or is_end.all() or random.random() < 0.2):
                return self._tokenizer.decode(tokens, skip_special_tokens=False), ""
            choices = allowed[~is_end]
            closing = np.intersect1d(choices, self._closing)
            tokens.append(
                int(random.choice(closing if len(closing) and (is_late or random.random() < 0.3) else choices))
            )
            matcher.advance(tokens[-1])
        return None, ""


def main() -> None:
    """Draw answers, print a table and what is wrong; with --output also write JSON."""
    use_engine_environment()
    parser = argparse.ArgumentParser(description="Draw random answers to many JSON schemas and validate them.")
    parser.add_argument("files", nargs="*", type=Path, help="JSON files, OpenAPI files, and wheels with such files")
    parser.add_argument("--packages", nargs="*", default=["openai.types"], help="packages with pydantic models")
    parser.add_argument("--schemas", type=int, default=300, help="the most schemas, drawn evenly from all sources")
    parser.add_argument("--seeds", type=int, default=5, help="answers to each schema")
    parser.add_argument("--output", type=Path, help="also write the results to this JSON file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    sources = [dict(of_package(name)) for name in arguments.packages] + [
        dict(of_file(path)) for path in arguments.files
    ]
    schemas = evenly(sources, arguments.schemas)
    console = Console()
    bench = Bench(resolve_model(None, console).path, arguments.seeds)
    results = {name: bench.result(schema) for name, schema in track(schemas.items(), "Drawing", console=console)}
    counts = Counter(result for result, _ in results.values())
    table = Table("result", "schemas")
    for result in RESULTS:
        table.add_row(result, str(counts[result]))
    console.print(table)
    for name, (result, reason) in results.items():
        if result in RESULTS[-2:]:
            console.print(f"{result} {name}: {reason}", markup=False)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def evenly(sources: Sequence[Mapping[str, Any]], most: int) -> Mapping[str, Any]:
    """At most so many schemas, the same number from each source as far as it has them; always the same ones."""
    waiting = [Random(0).sample(list(source), len(source)) for source in sources]
    kept: dict[str, Any] = {}
    while len(kept) < most and any(waiting):
        for names, source in zip(waiting, sources, strict=True):
            if names and len(kept) < most:
                name = names.pop()
                kept[name] = source[name]
    return kept


if __name__ == "__main__":
    main()
