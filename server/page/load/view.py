"""The server view: figures, charts, and recent requests made with this page's key."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec
from nicegui import context, ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from server.page.api import ApiError
from server.page.load.poller import WINDOW_S, SharedPollers
from server.page.load.requests import RequestRecord, details_of
from server.page.session import Session


class _Load(Element, component="../static/load.js"):
    """The element that draws a server's state. Its event `open` requests the contents of a row."""


_ALL = "All models"
_ELSEWHERE = frozenset({"requests", "models"})
"""Parts of the state that have their own place."""


class LoadView:
    """Shows the server's load. Polls only while its tab is selected and its browser is connected and visible."""

    def __init__(self, session: Session, pollers: SharedPollers) -> None:
        self._session = session
        self._pollers = pollers
        self._is_chosen = False
        self._is_shown = True
        self._end: Callable[[], None] | None = None
        self._requests_shown: list[Any] | None = None
        with ui.element("section").classes("load").props('aria-label="Server"'):
            self._choice = ui.select({"": _ALL}, value="", on_change=self._choose).classes("shown")
            self._choice.props('outlined dense options-dense aria-label="Shown model"').set_visibility(False)
            self._load = _Load().on("open", self._show_details).on("ready", self._show_requests)
            self._load.props["seconds"] = int(WINDOW_S)
        ui.on("visibility", self._note_visibility)
        self._client = context.client
        self._client.on_connect(self._update)
        self._client.on_disconnect(self._update)
        self._client.on_delete(self._update)

    def set_chosen(self, is_chosen: bool) -> None:
        """Record whether this view's tab is selected."""
        self._is_chosen = is_chosen
        self._update()

    def _choose(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None
        self._update()

    def _note_visibility(self, event: GenericEventArguments) -> None:
        self._is_shown = event.args == "visible"
        self._update()

    def _update(self) -> None:
        is_seen = self._is_chosen and self._is_shown and self._client.has_socket_connection
        if is_seen and self._end is None:
            self._end = self._pollers.subscribe(self._session.key, self._show, self._choice.value or "")
        elif not is_seen and self._end is not None:
            self._end()
            self._end = None

    def _show(self, state: dict[str, Any]) -> None:
        names = state["models"]
        if len(names) > 1 and names != list(self._choice.options)[1:]:
            shown = self._choice.value if self._choice.value in names else ""
            self._choice.set_options({"": _ALL} | {name: name for name in names}, value=shown)
            self._choice.set_visibility(True)
        self._load.run_method("show", {name: value for name, value in state.items() if name not in _ELSEWHERE})
        if state["requests"] != self._requests_shown:
            self._requests_shown = state["requests"]
            self._show_requests()

    def _show_requests(self) -> None:
        self._load.run_method("showRequests", self._requests_shown)

    async def _show_details(self, event: GenericEventArguments) -> None:
        path = f"/requests/{quote(str(event.args), safe='')}"
        try:
            found = await self._session.with_key(lambda key: self._session.api.get(path, key))
            details = msgspec.to_builtins(details_of(msgspec.convert(found, RequestRecord)))
        except (ApiError, msgspec.ValidationError) as problem:
            details = {"problem": str(problem)}
        self._load.run_method("showDetails", str(event.args), details)
