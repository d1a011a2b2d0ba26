"""Opening the sockets at which routers follow the prefix cache."""

from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING

from server.config import Settings
from server.http.draining_server import BindError

if TYPE_CHECKING:
    from server.engine.kv_publisher import KVPublisher


def open_publisher(settings: Settings) -> "AbstractContextManager[KVPublisher | None]":
    """Closes what it has opened; None where nothing is to be published. Raises BindError."""
    if settings.kv_events is None:
        return nullcontext()
    try:
        from server.engine.kv_publisher import KVPublisher  # noqa: PLC0415  (pyzmq need not be installed)
    except ImportError:
        raise BindError("kv_events needs pyzmq: pip install 'samewise[kv-events]'") from None
    try:
        return closing(KVPublisher(settings.kv_events, settings.kv_events_topic, settings.kv_events_replay))
    except OSError as error:
        raise BindError(str(error)) from None
