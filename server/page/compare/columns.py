"""Elements that a browser does more with than to show them."""

from collections.abc import Mapping
from typing import Any

from nicegui.element import Element


class Columns(Element, component="../static/columns.js"):
    """Answers beside each other, which can be marked from where they differ from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.classes("columns")

    def mark_differences(self) -> None:
        """Once they are whole."""
        self.run_method("mark")

    def clear_marks(self) -> None:
        """Before they change."""
        self.run_method("unmark")


class BeamTree(Element, component="../static/beam_tree.js"):
    """Beams as a tree through which the keys lead."""

    def __init__(self) -> None:
        super().__init__()
        self.classes("beams")

    def show(self, tree: Mapping[str, Any] | None) -> None:
        """One that `beams.described` has made; None for none."""
        self.run_method("show", tree)
