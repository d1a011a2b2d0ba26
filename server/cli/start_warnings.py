"""What the log says at the start of settings that are allowed and may not be meant."""

import logging

from server.config import Settings

_BY_HEADS = ("auto", "eagle", "hydra", "medusa")
"""Methods of speculation that use heads which learn."""
_logger = logging.getLogger("samewise.server")


def warn_if_open(settings: Settings, address: str, remedy: str) -> None:
    """Of a server that others than this machine's users can reach; `remedy` says what can be done."""
    if not settings.has_keys:
        _logger.warning(
            "The server listens on %s without an API key: whoever can reach it may use it. %s", address, remedy
        )


def warn_if_unused(settings: Settings) -> None:
    """Learning is not refused where speculation is off by default, since requests can ask for it."""
    if settings.learn and settings.speculation not in _BY_HEADS:
        _logger.warning(
            "Heads learn that few requests will use: speculation is %s, so only requests that name another method do.",
            settings.speculation,
        )
