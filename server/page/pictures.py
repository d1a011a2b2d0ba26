"""Pictures for the next message: chosen, pasted or dropped, and shown above the text field.

The browser sends a file's own bytes, in pieces that fit into its messages. They stay in this process until the page is
closed. The browser keeps them in a database of its own, and sends them again when the page was loaded again.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

from nicegui import ui
from nicegui.events import GenericEventArguments

from server.page.capabilities import ImageLimits
from server.page.conversation import PictureName
from server.page.elements import icon_button
from server.page.session import Session

_MOST_CHARACTERS = 128 << 20
"""Base64 of all pictures of a page."""
_ID_LENGTH, _NAME_LENGTH = 40, 100
_RECEIVE = "(e) => window.samewise.readPictures(e, emit)"
_RECEIVE_AGAIN = "(e) => window.samewise.sendKept(e.detail, emit)"
_AGAIN_S = 10.0
"""Seconds to wait for pictures that the browser sends again."""


class PictureTray:
    """The pictures of the next message. Invisible if the model takes none."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._button: ui.button | None = None
        self._chosen: list[PictureName] = []
        self._coming: dict[str, list[str]] = {}
        self._refused: set[str] = set()
        self._wanted: set[str] = set()
        """Ids of pictures that the browser has been asked for."""
        self._all_here = asyncio.Event()
        self._all_here.set()
        with ui.element("div").classes("tray").props('role=group aria-label="Images of the message"') as self._row:
            self._files = ui.element("input").props("type=file multiple hidden")
            self._thumbnails = ui.element("div").classes("thumbnails")
        self._files.on("change", self._receive, js_handler=_RECEIVE)
        self._files.on("wanted", self._receive_again, js_handler=_RECEIVE_AGAIN)
        self._row.set_visibility(False)
        session.on_model(self._fit_model)

    @property
    def _limits(self) -> ImageLimits | None:
        capabilities = self._session.capabilities
        return None if capabilities is None else capabilities.images

    @property
    def _may_take(self) -> bool:
        """Whether this model takes images, or another one may."""
        return self._limits is not None or self._session.has_several

    def _fit_model(self) -> None:
        """Offer what the chosen model takes."""
        if self._button is not None:
            self._button.set_visibility(self._limits is not None)
        if self._limits is not None:
            self._files.props["accept"] = ",".join(f"image/{form}" for form in self._limits.formats)

    def take_from(self, row: ui.element) -> None:
        """Add the button to a row, and take pictures that are pasted or dropped into it."""
        if not self._may_take:
            return
        for event in ("paste", "drop"):
            row.on(event, self._receive, js_handler=_RECEIVE)
        row.on("dragover", js_handler="(e) => e.preventDefault()")
        with row:
            self._button = icon_button("add_photo_alternate", "Add images")
        self._button.on("click", js_handler=f"() => getHtmlElement({self._files.id}).click()")
        self._button.move(target_index=0)
        self._fit_model()

    @property
    def chosen(self) -> Sequence[PictureName]:
        """The pictures of the next message."""
        return tuple(self._chosen)

    def clear(self) -> None:
        """Begin the next message."""
        self._chosen.clear()
        self._show()

    def bring_back(self, pictures: Sequence[PictureName]) -> None:
        """Ask the browser for pictures of a conversation that this process does not have."""
        lacking = [one.id for one in pictures if one.id not in self._session.pictures and one.id not in self._wanted]
        if self._may_take and lacking:
            self._wanted.update(lacking)
            self._all_here.clear()
            self._session.browser.ask_for_pictures(self._files, lacking)

    async def wait(self) -> None:
        """Wait for the pictures that the browser has been asked for, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_S):
                await self._all_here.wait()

    def _receive_again(self, event: GenericEventArguments) -> None:
        """Take a piece of a wanted picture; an empty one if the browser does not have it."""
        match event.args:
            case [str(key), str(), str(piece), bool(is_last)] if key in self._wanted:
                pieces = self._coming.setdefault(key, [])
                held = sum(map(len, self._session.pictures.values())) + sum(map(len, pieces))
                if held + len(piece) <= _MOST_CHARACTERS:
                    pieces.append(piece)
                if is_last:
                    self._wanted.discard(key)
                    if url := "".join(self._coming.pop(key)):
                        self._session.pictures[key] = url
                if not self._wanted:
                    self._all_here.set()

    def _receive(self, event: GenericEventArguments) -> None:
        """Take a piece of a picture: its id, its name, a piece of its data URL, and whether that is the last."""
        match event.args:
            case [str(key), str(name), str(piece), bool(is_last)] if len(key) <= _ID_LENGTH:
                self._take(key, name[:_NAME_LENGTH], piece, is_last=is_last)

    def _take(self, key: str, name: str, piece: str, *, is_last: bool) -> None:
        pieces = self._coming.setdefault(key, [])
        pieces.append(piece)
        length = sum(map(len, pieces))
        held = sum(map(len, self._session.pictures.values()))
        others = sum(len(one) for other, given in self._coming.items() if other != key for one in given)
        if key in self._refused:
            del self._coming[key]
        elif self._limits is None:
            self._refuse(key, f"{self._session.model} takes no images.")
        elif length * 3 // 4 > self._limits.max_bytes + 100:
            self._refuse(key, f"{name} is larger than {self._limits.max_bytes >> 20} MiB.")
        elif held + others + length > _MOST_CHARACTERS:
            self._refuse(key, "This page holds too many images. Reload it, or use fewer.")
        elif len(self._chosen) >= self._limits.max_images:
            self._refuse(key, f"A request can have at most {self._limits.max_images} images.")
        elif is_last:
            self._session.pictures[key] = "".join(self._coming.pop(key))
            self._chosen.append(PictureName(key, name, length * 3 // 4))
            self._show()

    def _refuse(self, key: str, reason: str) -> None:
        del self._coming[key]
        if len(self._refused) < 1000:
            self._refused.add(key)
        self._session.browser.remove_picture(key)
        with self._row:
            ui.notify(reason, type="negative")

    def _remove(self, picture: PictureName) -> None:
        self._chosen.remove(picture)
        self._session.pictures.pop(picture.id, None)
        self._session.browser.remove_picture(picture.id)
        self._show()

    def _show(self) -> None:
        self._row.set_visibility(bool(self._chosen))
        self._thumbnails.clear()
        with self._thumbnails:
            for picture in self._chosen:
                with show_picture(self._session, picture):
                    icon_button("close", f"Remove {picture.name}", partial(self._remove, picture), small=True)


def show_picture(session: Session, picture: PictureName) -> ui.element:
    """A thumbnail with name and size. It is empty if the browser does not have the picture any more."""
    with ui.element("figure").classes("thumbnail") as figure:
        image = ui.element("img")
        image.props["alt"] = picture.name
        with ui.element("figcaption"):
            ui.label(f"{picture.name} · {max(1, picture.num_bytes >> 10):,} KiB").classes("quiet")
    session.browser.show_picture(image, picture.id)
    return figure
