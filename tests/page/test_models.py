"""Models that are loaded or not, as the page tells them apart, and what a session knows of the chosen one."""

from typing import Any, cast

import msgspec
import pytest

from server.page.api import Api, ApiError
from server.page.browser import Browser, StoredState
from server.page.capabilities import Capabilities, ImageLimits
from server.page.models import ModelCard, ModelCards, are_several
from server.page.session import Session

LOADED, UNLOADED = {"value": "loaded"}, {"value": "unloaded", "failed": False, "error": None, "progress": None}
SEES = Capabilities({}, images=ImageLimits(("png",), 1, 1 << 20))


@pytest.mark.parametrize(
    ("status", "label", "advice"),
    [
        (None, "m", ""),
        (LOADED, "m", ""),
        (UNLOADED, "m · not loaded", "m is not loaded. Your next message loads it."),
        ({"value": "loading", "progress": 0.4}, "m · loading 40 %", "m is loading 40 %."),
        ({"value": "loading", "progress": {"current": "text_model"}}, "m · loading", "m is loading."),  # llama.cpp's
        ({"value": "unloaded", "failed": True, "error": "No room."}, "m · failed", "m could not be loaded: No room."),
        (UNLOADED | {"waiting": 2}, "m · waiting", "m waits to be loaded."),
        ("odd", "m", ""),
    ],
)
def test_states_in_words(status: Any, label: str, advice: str) -> None:
    sent = msgspec.json.encode({"data": [{"id": "m", "status": status}]})
    (card,) = msgspec.json.decode(sent, type=ModelCards).data or ()
    assert (card.label, card.advice) == (label, advice)


def test_names_of_one_model_are_not_several() -> None:
    assert not are_several([ModelCard("a", root="a"), ModelCard("alias", root="a")])
    assert are_several([ModelCard("a"), ModelCard("b")])


class _Server:
    """An Api with models a, which is loaded, and b, whose capabilities are known once it is."""

    def __init__(self) -> None:
        self.b: Any = UNLOADED
        self.asked: list[str | None] = []

    async def models(self, key: str) -> list[ModelCard]:
        return [ModelCard("b", status=self.b), ModelCard("a", status=LOADED)]

    async def capabilities(self, key: str, model: str | None = None) -> Capabilities:
        self.asked.append(model)
        if model == "b" and self.b is UNLOADED:
            raise ApiError("not loaded yet", 503)
        return SEES if model == "b" else Capabilities({})


class _Browser:
    async def begin(self) -> StoredState:
        return StoredState()


async def _no_key(reason: str) -> str:
    raise AssertionError(reason)


async def test_what_is_known_follows_the_model() -> None:
    server, told = _Server(), []
    session = Session(cast(Api, server), cast(Browser, _Browser()), _no_key)
    await session.open()
    assert (session.model, session.has_several, server.asked) == ("a", True, ["a"])
    session.on_model(lambda: told.append(session.capabilities))
    await session.choose("b")
    assert told == [None], "it is not loaded, so nothing is known"
    await session.refresh()
    server.b = LOADED
    await session.refresh()
    await session.refresh()
    assert told == [None, SEES], "asked once more, when it is loaded"
