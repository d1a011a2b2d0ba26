"""The view of the server as one of the page's tabs, which is not there before somebody opens it."""

from nicegui import ui

from server.page.load.view import LoadView
from server.page.load.watch import Watches
from server.page.session import Session


class LoadTab:
    """In the panel of its tab."""

    def __init__(self, tabs: ui.tabs, tab: ui.tab, session: Session, watches: Watches) -> None:
        """Builds nothing yet; where it is called, the view will be."""
        self._tab = tab
        self._session = session
        self._watches = watches
        self._place = ui.element("div").classes("contents")
        self._view: LoadView | None = None
        tabs.on_value_change(lambda event: self._choose(event.value))
        self._choose(tabs.value)

    def _choose(self, tab: str | None) -> None:
        is_chosen = tab == self._tab.props["name"]
        if self._view is None:
            if not is_chosen:
                return
            with self._place:
                self._view = LoadView(self._session, self._watches)
        self._view.set_chosen(is_chosen)
