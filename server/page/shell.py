"""The frame of the page: its head, its drawers, and the views between them."""

import asyncio
from contextlib import suppress

from nicegui import context, ui

from server.page.api import Api, ApiError
from server.page.browser import Browser
from server.page.chat.conversation_list import ConversationList
from server.page.chat.view import ChatView
from server.page.compare.view import CompareView
from server.page.key_dialog import KeyDialog
from server.page.lazily import when_first_chosen
from server.page.load.view import LoadView
from server.page.load.watch import Watches
from server.page.parameters.panel import SettingsPanel
from server.page.session import Session
from server.page.theme import ThemeButton

_HEAD = """
<link rel="stylesheet" href="static/page.css">
<link rel="stylesheet" href="static/compare.css">
<link rel="stylesheet" href="static/load.css">
<link rel="stylesheet" href="static/inside.css">
<script src="static/page.js"></script>
"""
_CONNECT_S = 30.0
_STARTING = 503
_RETRY_S = 2.0


class Shell:
    """One page that somebody looks at."""

    def __init__(self, api: Api, watches: Watches) -> None:
        self._client = context.client
        self._watches = watches
        self._browser = Browser(self._client)
        self._key_dialog = KeyDialog()
        self._session = Session(api, self._browser, self._key_dialog.ask)
        self._try_again = asyncio.Event()

    async def build(self) -> None:
        """Show the frame, and all else once the browser has told what it remembers. Cancelled if the tab is gone."""
        building = asyncio.current_task()
        self._client.on_delete(lambda: building and building.cancel())
        ui.add_head_html(_HEAD)
        self._theme = ThemeButton(self._browser)
        self._left = ui.left_drawer(value=None, fixed=True, bordered=True).props("width=280 breakpoint=900")
        self._left.classes("side")
        self._right = ui.right_drawer(value=False, fixed=True, bordered=True).props("width=340 breakpoint=1100")
        self._right.classes("side").props('role=complementary aria-label="Settings"')
        self._header()
        self._main = ui.element("div").classes("main")
        await self._client.connected(timeout=_CONNECT_S)
        while problem := await self._problem():
            await self._show_problem(problem)
        await self._show()

    def _header(self) -> None:
        with ui.header().classes("head"):
            menu = ui.button(icon="menu", on_click=self._left.toggle)
            menu.props('flat round dense aria-label="Conversations and views"')
            ui.label("Samewise").classes("brand")
            with ui.tabs().props("dense no-caps").classes("views") as self._tabs:
                self._chat_tab = ui.tab("Chat")
                self._compare_tab = ui.tab("Compare")
                self._server_tab = ui.tab("Server")
            self._models = ui.select([], on_change=self._choose_model).props("outlined dense options-dense")
            self._models.props('aria-label="Model"').classes("model")
            ui.space()
            self._theme.build()
            settings = ui.button(icon="tune", on_click=self._right.toggle)
            settings.props('flat round dense aria-label="Settings"').tooltip("Settings")

    async def _problem(self) -> ApiError | None:
        """What keeps the browser or the server from telling what there is."""
        try:
            await self._session.open()
        except ApiError as problem:
            return problem
        except TimeoutError:
            return ApiError("The browser takes too long to answer.")
        return None

    async def _show_problem(self, problem: ApiError) -> None:
        """Until somebody wants to try again, or soon by itself while the server starts."""
        self._try_again.clear()
        with self._main, ui.column().classes("center"):
            ui.label(str(problem)).classes("problem").props("role=alert")
            ui.button("Try again", on_click=self._try_again.set).props("outline no-caps")
        with suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_S if problem.status == _STARTING else None):
                await self._try_again.wait()
        self._main.clear()

    async def _show(self) -> None:
        self._theme.set(self._session.memory.theme)
        self._models.set_options(self._session.models, value=self._session.model or None)
        with self._right:
            settings = SettingsPanel(self._session)
        with self._main:
            chosen = self._tabs.value or self._chat_tab  # perhaps before there was anything to see
            panels = ui.tab_panels(self._tabs, value=chosen, animated=False, keep_alive=True).classes("panels")
        with panels, ui.tab_panel(self._chat_tab):
            chat = ChatView(self._session, settings)
        with panels, ui.tab_panel(self._compare_tab):
            when_first_chosen(self._tabs, self._compare_tab, lambda: CompareView(self._session, settings))
        with panels, ui.tab_panel(self._server_tab):
            when_first_chosen(self._tabs, self._server_tab, self._make_load_view)
        try:
            await chat.reopen()
        except TimeoutError:
            chat.begin()
            ui.notify("The browser takes too long to bring the last conversation.", type="negative")
        with self._left:
            ConversationList(self._session, chat)

    def _make_load_view(self) -> None:
        view = LoadView(self._session, self._watches)
        self._tabs.on_value_change(lambda event: view.set_chosen(event.value == self._server_tab.props["name"]))
        view.set_chosen(True)

    def _choose_model(self) -> None:
        self._session.model = self._models.value or ""
