"""The view of the server: figures, charts, and the last requests of this page's key."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec
from nicegui import context, ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from server.page.api import ApiError
from server.page.load.reader import WINDOW_S
from server.page.load.records import RequestRecord
from server.page.load.requests import details_of
from server.page.load.watch import Watches
from server.page.session import Session


class _Figures(Element, component="../static/load.js"):
    """Draws what it is told."""


class _Requests(Element, component="../static/requests.js"):
    """A table whose rows open; asks for what is in them by the event `open`."""


class LoadView:
    """Looks at the server while it is seen itself: its tab is chosen, its browser's tab shown, and connected."""

    def __init__(self, session: Session, watches: Watches) -> None:
        self._session = session
        self._watches = watches
        self._is_chosen = False
        self._is_shown = True
        self._end: Callable[[], None] | None = None
        self._requests_shown: list[Any] | None = None
        with ui.element("section").classes("load").props('aria-label="Server"'):
            self._figures = _Figures()
            ui.label(f"Rates and latencies are of the last {WINDOW_S:.0f} seconds.").classes("quiet")
            self._requests = _Requests().on("open", self._tell).on("ready", self._show_requests)
        ui.on("visibility", self._note_visibility)
        self._client = context.client
        self._client.on_connect(self._look)
        self._client.on_disconnect(self._note_disconnection)
        self._client.on_delete(self._look_away)

    def set_chosen(self, is_chosen: bool) -> None:
        """Whether its tab is."""
        self._is_chosen = is_chosen
        self._look() if is_chosen else self._look_away()

    def _note_visibility(self, event: GenericEventArguments) -> None:
        self._is_shown = event.args == "visible"
        self._look() if self._is_shown else self._look_away()

    def _note_disconnection(self) -> None:
        """It may be an old connection that ends, after there was a new one."""
        if not self._client.has_socket_connection:
            self._look_away()

    def _look(self) -> None:
        if self._end is None and self._is_chosen and self._is_shown:
            self._end = self._watches.look(self._session.key, self._show)

    def _look_away(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None

    def _show(self, reading: dict[str, Any]) -> None:
        requests = reading["requests"]
        self._figures.run_method("show", {name: value for name, value in reading.items() if name != "requests"})
        if requests != self._requests_shown:
            self._requests_shown = requests
            self._show_requests()

    def _show_requests(self) -> None:
        self._requests.run_method("show", self._requests_shown)

    async def _tell(self, event: GenericEventArguments) -> None:
        """What is in a row."""
        request_id = str(event.args)
        try:
            found = await self._session.with_key(
                lambda key: self._session.api.get(f"/requests/{quote(request_id, safe='')}", key)
            )
            details = msgspec.to_builtins(details_of(msgspec.convert(found, RequestRecord)))
        except (ApiError, msgspec.ValidationError) as problem:
            details = {"problem": str(problem)}
        self._requests.run_method("tell", request_id, details)
