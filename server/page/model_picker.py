"""The choice of a model, and what is said about a model that is not loaded."""

from nicegui import background_tasks, ui

from server.page.api import ApiError
from server.page.session import Session

_READ_EVERY_S = 2.0


class ModelPicker:
    """The list of models with their states, which are read again while the page is open."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._labels: dict[str, str] = {}
        self._choice = ui.select({}, on_change=self._choose).props("outlined dense options-dense")
        self._choice.props('aria-label="Model"').classes("model")

    def show(self) -> None:
        """Show the models of the session."""
        labels = {card.id: card.label for card in self._session.models}
        if labels != self._labels:
            self._labels = labels
            self._choice.set_options(labels, value=self._session.model if self._session.model in labels else None)

    def keep_up(self, notice: "ModelNotice") -> None:
        """Keep the states up to date, here and in the notice."""
        if not self._session.has_several:
            return

        async def read() -> None:
            try:
                await self._session.refresh()
            except ApiError:
                return  # the next message shows it
            self.show()
            notice.show()

        ui.timer(_READ_EVERY_S, read, immediate=False)

    async def _choose(self) -> None:
        model = self._choice.value or ""
        if model == self._session.model:
            return
        try:
            await self._session.choose(model)
        except ApiError as problem:
            ui.notify(str(problem), type="negative")


class ModelNotice:
    """Says that the chosen model is not loaded, and offers to load it. Invisible otherwise."""

    def __init__(self, session: Session) -> None:
        self._session = session
        with ui.element("div").classes("model-notice").props("role=status") as self._row:
            self._text = ui.label().classes("quiet grow")
            self._load = ui.button("Load it now", on_click=self._start_load).props("flat no-caps dense")
        session.on_model(self.show)
        self.show()

    def show(self) -> None:
        """Show the state of the chosen model."""
        card = self._session.card
        advice = "" if card is None else card.advice
        self._text.set_text(advice)
        self._row.set_visibility(bool(advice))
        self._load.set_visibility(card is not None and card.is_unloaded)

    def _start_load(self) -> None:
        background_tasks.create(self._load_model(), name="load a model")

    async def _load_model(self) -> None:
        try:
            await self._session.load_model()
        except ApiError as problem:
            if not self._row.is_deleted:
                with self._row:
                    ui.notify(str(problem), type="negative")
