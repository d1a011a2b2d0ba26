"""References of a JSON schema to places in the same document."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from model_runner.read_numbers import whole_number
from server.generation.constraints.fragment import ConstraintError, under

_NO_SCHEMAS = frozenset({"const", "enum", "default", "examples", "example"})


class References:
    """Resolves the references within one document."""

    def __init__(self, root: Any, path: str) -> None:
        self._root = root
        self._path = path
        self._anchors: dict[str, tuple[Any, str]] | None = None

    def resolve(self, reference: object, path: str) -> tuple[Any, str]:
        """The schema that a reference names, and its path.

        Raises ConstraintError with the reference's path if it points to another document or to nothing.
        """
        if not isinstance(reference, str):
            raise ConstraintError(path, "Expected a string.")
        document, _, fragment = reference.partition("#")
        own = self._root.get("$id") if isinstance(self._root, dict) else None
        if document and (not isinstance(own, str) or document != own.rstrip("#")):
            raise ConstraintError(path, "References to other documents are not supported.")
        fragment = unquote(fragment)
        if not fragment:
            return self._root, self._path
        found = self._at(fragment) if fragment.startswith("/") else self._named(fragment)
        if found is None:
            raise ConstraintError(path, "The reference has no target in this schema.")
        return found

    def _at(self, pointer: str) -> tuple[Any, str] | None:
        """The part that a JSON pointer names; None if there is none, or it is inside an embedded document."""
        here, path = self._root, self._path
        for step in pointer[1:].split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and key in here:
                here, path = here[key], under(path, key)
            elif isinstance(here, list) and (index := whole_number(key, len(here) - 1)) is not None:
                here, path = here[index], under(path, index)
            else:
                return None
            if is_document(here):
                return None
        return here, path

    def _named(self, anchor: str) -> tuple[Any, str] | None:
        if self._anchors is None:
            self._anchors = {}
            for schema, path in _objects(self._root, self._path):
                for keyword in ("$anchor", "$dynamicAnchor"):
                    if isinstance(schema.get(keyword), str):
                        self._anchors.setdefault(schema[keyword], (schema, path))
        return self._anchors.get(anchor)


def is_document(schema: Any) -> bool:
    """Whether a part of a document has its own `$id`, so that references inside are relative to it."""
    return isinstance(schema, dict) and isinstance(schema.get("$id"), str) and not schema["$id"].startswith("#")


def _objects(root: Any, path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """All objects in the document, each of which may be a schema."""
    waiting = [(root, path)]
    while waiting:
        here, path = waiting.pop()
        if isinstance(here, dict):
            yield here, path
            inside = [(value, under(path, key)) for key, value in here.items() if key not in _NO_SCHEMAS]
            waiting += [(value, at) for value, at in inside if not is_document(value)]
        elif isinstance(here, list):
            waiting += [(value, under(path, index)) for index, value in enumerate(here)]
