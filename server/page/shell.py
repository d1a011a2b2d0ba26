"""The page's frame: header, drawers and the views."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from nicegui import context, ui
from nicegui.events import ValueChangeEventArguments

from server.page.api import Api, ApiError, can_be_sent
from server.page.browser import Browser
from server.page.chat import ChatView
from server.page.compare.view import CompareView
from server.page.conversation_list import ConversationList
from server.page.elements import icon_button, name_button
from server.page.load.poller import SharedPollers
from server.page.load.view import LoadView
from server.page.model_picker import ModelPicker
from server.page.session import Session
from server.page.settings import SettingsPanel

_HEAD = """
<link rel="stylesheet" href="static/page.css">
<script src="static/page.js"></script>
"""
_CONNECT_S = 30.0
_STARTING = 503
_RETRY_S = 2.0
_THEMES: dict[str, tuple[bool | None, str]] = {
    "auto": (None, "brightness_auto"),
    "light": (False, "light_mode"),
    "dark": (True, "dark_mode"),
}


class Shell:
    """The page in one tab."""

    def __init__(self, api: Api, pollers: SharedPollers) -> None:
        self._client = context.client
        self._pollers = pollers
        self._browser = Browser(self._client)
        self._key_dialog = KeyDialog()
        self._session = Session(api, self._browser, self._key_dialog.ask)
        self._try_again = asyncio.Event()

    async def build(self) -> None:
        """Show the frame, then the views once browser and server have answered. Cancelled when the tab is closed."""
        building = asyncio.current_task()
        self._client.on_delete(lambda: building and building.cancel())
        ui.add_head_html(_HEAD)
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
            icon_button("menu", "Conversations and views", self._left.toggle)
            ui.label("Samewise").classes("brand")
            with ui.tabs().props("dense no-caps").classes("views") as self._tabs:
                self._chat_tab = ui.tab("Chat")
                self._compare_tab = ui.tab("Compare")
                self._server_tab = ui.tab("Server")
            self._models = ModelPicker(self._session)
            ui.space()
            self._theme = ThemeButton(self._browser)
            icon_button("tune", "Settings", self._right.toggle)

    async def _problem(self) -> ApiError | None:
        """Open the session; returns the error, or None."""
        try:
            await self._session.open()
        except ApiError as problem:
            return problem
        except TimeoutError:
            return ApiError("The browser did not answer in time.")
        return None

    async def _show_problem(self, problem: ApiError) -> None:
        """Show the error until the user tries again; while the server starts, only for `_RETRY_S`."""
        self._try_again.clear()
        with self._main, ui.column().classes("center"):
            ui.label(str(problem)).classes("problem").props("role=alert")
            ui.button("Try again", on_click=self._try_again.set).props("outline no-caps")
        with suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_S if problem.status == _STARTING else None):
                await self._try_again.wait()
        self._main.clear()

    async def _show(self) -> None:
        self._theme.set(self._session.stored.theme)
        self._models.show()
        with self._right:
            settings = SettingsPanel(self._session)
        with self._main:
            chosen = self._tabs.value or self._chat_tab  # the user may have selected a tab before the views exist
            panels = ui.tab_panels(self._tabs, value=chosen, animated=False, keep_alive=True).classes("panels")
        with panels, ui.tab_panel(self._chat_tab):
            chat = ChatView(self._session, settings)
        with panels, ui.tab_panel(self._compare_tab):
            self._make_when_chosen(self._compare_tab, lambda: CompareView(self._session, settings))
        with panels, ui.tab_panel(self._server_tab):
            self._make_when_chosen(self._server_tab, self._make_load_view)
        self._models.keep_up(chat.model_notice)
        try:
            await chat.reopen()
        except TimeoutError:
            chat.begin()
            ui.notify("The browser did not load the last conversation in time.", type="negative")
        with self._left:
            ConversationList(self._session, chat)

    def _make_when_chosen(self, tab: ui.tab, make: Callable[[], object]) -> None:
        """Create a view here when its tab is first selected, so that unused views cost nothing."""
        place = context.slot
        is_made = False

        def look(chosen: str | None) -> None:
            nonlocal is_made
            if chosen == tab.props["name"] and not is_made:
                is_made = True
                with place:
                    make()

        self._tabs.on_value_change(lambda event: look(event.value))
        look(self._tabs.value)

    def _make_load_view(self) -> None:
        view = LoadView(self._session, self._pollers)
        self._tabs.on_value_change(lambda event: view.set_chosen(event.value == self._server_tab.props["name"]))
        view.set_chosen(True)


class ThemeButton:
    """Button that switches between the light, the dark and the system's theme."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._dark = ui.dark_mode(None)
        self._button = icon_button("", "Theme", self._next)
        self.set("auto")

    def set(self, theme: str | None) -> None:
        """Use this theme; None and unknown names mean the system's theme."""
        self._theme = theme if theme in _THEMES else "auto"
        self._dark.value, icon = _THEMES[self._theme]
        self._button.set_icon(icon)
        name_button(self._button, f"Theme: {self._theme}")

    def _next(self) -> None:
        names = list(_THEMES)
        self.set(names[(names.index(self._theme) + 1) % len(names)])
        self._browser.remember("theme", self._theme)


class KeyDialog:
    """Dialog that asks for an API key, once for all requests that wait for it."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[str] | None = None
        with ui.dialog().props('aria-label="API key"') as self._dialog, ui.card().classes("dialog"):
            ui.label("This server requires an API key").classes("title").props("role=heading aria-level=2")
            self._reason = ui.label().classes("problem").props("role=alert")
            self._input = ui.input("API key", password=True, password_toggle_button=True).props("outlined autofocus")
            self._input.classes("wide").on("keydown.enter", self._use)
            ui.label("The key is kept until this tab is closed and sent only to this server.").classes("quiet")
            with ui.row().classes("end"):
                ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps")
                ui.button("Use this key", on_click=self._use).props("no-caps unelevated")
        self._dialog.on_value_change(self._change)
        context.client.on_delete(self._leave)

    async def ask(self, reason: str) -> str:
        """Show `reason` and wait for the key; "" if the user cancels. Cancelled when the tab is closed."""
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
            self._reason.set_text(reason)
            self._input.set_value("")
            self._dialog.open()
        return await asyncio.shield(self._waiting)

    def _use(self) -> None:
        key = self._input.value.strip()
        if can_be_sent(key):
            self._end(key)
            self._dialog.close()
        else:
            self._reason.set_text("This is not an API key: it contains characters that cannot be sent in a header.")

    def _change(self, event: ValueChangeEventArguments[bool]) -> None:
        if not event.value:
            self._end("")

    def _end(self, key: str) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set_result(key)

    def _leave(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
