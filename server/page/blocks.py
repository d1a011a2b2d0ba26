"""An element whose HTML grows at its end without being sent again."""

from collections.abc import Sequence

from nicegui.element import Element

from server.page.markdown import GrowingText


class Blocks(Element, component="static/blocks.js"):
    """Markdown that grows. The browser sanitises each block before it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.classes("prose")
        self._growing = GrowingText()
        self._blocks: list[str] = []
        self._is_there = False
        """Whether the browser has the element, which those of a hidden panel are not."""
        self.on("ready", self._begin)

    def append(self, text: str) -> None:
        """Show more of it at the end."""
        start = self._growing.num_final
        self._show(start, self._growing.feed(text))

    def set_text(self, text: str) -> None:
        """Show this instead of all that was there."""
        self._growing = GrowingText()
        self._show(0, self._growing.feed(text))

    def _show(self, start: int, blocks: Sequence[str]) -> None:
        self._blocks[start:] = blocks
        if self._is_there:
            self.run_method("show", start, list(blocks))

    def _begin(self) -> None:
        """The browser has the element, perhaps once more, and nothing in it."""
        self._is_there = True
        self.run_method("show", 0, self._blocks)
