"""The keys that are accepted now."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from server.config import Settings
from server.tenants.keys_file import KeysError, Tenants, digest_of, read_keys, unnamed
from server.tenants.tenant import Tenant

_CHECK_S = 1.0
"""Between two looks at whether the file has changed."""
_logger = logging.getLogger("samewise.keys")


class KeyRing:
    """Whose each key is. Only hashes are kept. The file is read again when it changes."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeysError if keys are configured that cannot be used, OSError if their file cannot be read."""
        self._path = settings.api_keys_file
        self._clock = clock
        self._fixed: Tenants = {}
        if settings.api_key is not None:
            key = settings.api_key.get_secret_value().strip()
            if not key:
                raise KeysError("The configured API key is empty.")
            self._fixed = {digest_of(key): replace(unnamed(key), sees_all_usage=True)}
        self._stamp = None if self._path is None else _stamp(self._path)
        self._checked = clock()
        self._tenants: Tenants = self._fixed if self._path is None else {**read_keys(self._path), **self._fixed}
        self._by_name = {tenant.name: tenant for tenant in self._tenants.values()}

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._tenants)

    def tenant_of(self, key: str) -> Tenant | None:
        """Who has the key; None for one that is not accepted.

        Looked up by its hash: how long that takes says nothing about keys that are nearly right.
        """
        self._look()
        return self._tenants.get(digest_of(key))

    def knows(self, name: str) -> bool:
        """Whether somebody of this name may use the server, with a key or because none is needed."""
        self._look()
        return not self._tenants or name in self._by_name

    def named(self, name: str) -> Tenant:
        """The tenant of this name, as it is configured now; one that has gone is not limited any more."""
        return self._by_name.get(name) or Tenant(name)

    def reload(self) -> None:
        """Read the file again. One that cannot be used changes nothing, and leaves an error in the log."""
        if self._path is None:
            return
        try:
            self._stamp = _stamp(self._path)
            self._tenants = {**read_keys(self._path), **self._fixed}
        except (KeysError, OSError) as error:
            _logger.error("The keys stay as they were: %s", error)
            return
        self._by_name = {tenant.name: tenant for tenant in self._tenants.values()}
        _logger.info("The keys were read again from %s: %d are accepted.", self._path, len(self._tenants))

    def _look(self) -> None:
        if self._path is None or self._clock() - self._checked < _CHECK_S:
            return
        self._checked = self._clock()
        try:
            is_changed = _stamp(self._path) != self._stamp
        except OSError:
            is_changed = self._stamp is not None
            self._stamp = None  # said once
        if is_changed:
            self.reload()


def _stamp(path: Path) -> tuple[int, int, int]:
    """Another one for another content."""
    status = path.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size
