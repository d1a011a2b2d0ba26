"""Where each object of the API is described: once, on its page, or within the one object that has it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from server.api.dialects import DIALECTS
from server.api.openapi import install_openapi

OBJECTS = "objects"
"""The page of the objects that several pages share."""
_PREFIX = "#/components/schemas/"


def openapi_document() -> dict[str, Any]:
    """The server's OpenAPI document, which GET /openapi.json returns."""
    app = FastAPI()
    for dialect in DIALECTS:
        app.include_router(dialect.router)
    install_openapi(app, DIALECTS)
    return app.openapi()


def name_in(reference: str) -> str:
    """The name of the object that a `$ref` leads to."""
    return reference.removeprefix(_PREFIX)


@dataclass(slots=True)
class Placement:
    """Finds the place of each object from the places of all that refer to it.

    An object with one referrer is described within it, unless it is one of several forms there. An object whose
    referrers are all on one page has a section on that page, and all others have one on the page of shared objects.
    """

    components: Mapping[str, Any]
    _referrers: dict[str, list[str]] = field(default_factory=dict)
    """By object: the pages, and the objects, that refer to it; each as often as it does."""
    _alternatives: set[str] = field(default_factory=set)
    """Objects that are one of several forms."""

    def add(self, page: str, schema: Any) -> None:
        """Note the objects that a page shows at its top level."""
        for name in self._note(f"/{page}", schema):
            self._follow(name)

    def _follow(self, name: str) -> None:
        for inner in self._note(name, self.components[name]):
            self._follow(inner)

    def _note(self, referrer: str, schema: Any) -> list[str]:
        """Note the references within a schema; returns the objects that were not met before."""
        found = list(_references(schema))
        met = [name for name, _ in found if name not in self._referrers]
        for name, is_alternative in found:
            self._referrers.setdefault(name, []).append(referrer)
            if is_alternative:
                self._alternatives.add(name)
        return list(dict.fromkeys(met))

    def has_section(self, name: str) -> bool:
        """Whether the object has a section of its own."""
        if "properties" not in self.components[name]:
            return False
        referrers = self._referrers[name]
        return len(referrers) > 1 or name in self._alternatives or name in referrers

    def page_of(self, name: str) -> str:
        """The page on which the object has its section, or within whose tables it stands."""
        pages = self._pages_of(name, frozenset())
        return next(iter(pages)) if len(pages) == 1 else OBJECTS

    def _pages_of(self, name: str, seen: frozenset[str]) -> set[str]:
        pages: set[str] = set()
        for referrer in self._referrers[name]:
            if referrer.startswith("/"):
                pages.add(referrer[1:])
            elif referrer not in seen:
                pages |= {OBJECTS} if len(found := self._pages_of(referrer, seen | {name})) > 1 else found
        return pages

    def sections(self, page: str) -> list[str]:
        """The objects with a section on this page, in the order in which they are met."""
        return [name for name in self._referrers if self.has_section(name) and self.page_of(name) == page]

    def expand(self, node: Any) -> Any:
        """The schema with references written out, except references to objects with a section."""
        if isinstance(node, dict):
            if "$ref" in node:
                name = name_in(node["$ref"])
                own = {key: value for key, value in node.items() if key != "$ref"}
                return node if self.has_section(name) else self.expand({**self.components[name], **own})
            return {key: self.expand(value) for key, value in node.items()}
        if isinstance(node, list):
            return [self.expand(item) for item in node]
        return node


def _references(node: Any, *, is_alternative: bool = False) -> Iterator[tuple[str, bool]]:
    """The objects that a schema refers to, and whether they are one of several forms of a value."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield name_in(node["$ref"]), is_alternative
        for key, value in node.items():
            if key in ("anyOf", "oneOf"):
                several = sum("$ref" in option or "$ref" in option.get("items", {}) for option in value) > 1
                for option in value:
                    yield from _references(option, is_alternative=several)
            elif key != "discriminator":
                yield from _references(value, is_alternative=is_alternative and key == "items")
    elif isinstance(node, list):
        for item in node:
            yield from _references(item)
