"""Decides after an engine crash which request caused it, and when the others go back in. Pure logic."""

from dataclasses import dataclass

SUSPICIOUS = 2
"""Crashes with a request in the engine after which the request is a suspect."""


@dataclass(frozen=True, slots=True)
class Crash:
    """The outcome of one engine crash."""

    victims: tuple[str, ...]
    """Requests that were in the engine and continue in the next one, in order of arrival."""
    culprit: str | None
    """The request to fail: the only suspect among the requests that were in the engine."""


class CrashPolicy:
    """Decides which requests may be in the engine, so that a request that kills it ends up failed alone.

    After its first crash a request goes back in with the others. Requests that saw two crashes are suspects. They go
    back in one at a time, together with unsuspected requests. If the engine dies with exactly one suspect in it, that
    suspect is the culprit.
    """

    def __init__(self) -> None:
        self._crashes: dict[str, int] = {}  # by live request, in order of arrival
        self._suspects: set[str] = set()
        self._inside: set[str] = set()
        self._waiting: dict[str, None] = {}  # an ordered set

    def add(self, request_id: str) -> None:
        """Add a request, which `release` will let in."""
        self._crashes[request_id] = 0
        self._waiting[request_id] = None

    def remove(self, request_id: str) -> None:
        """Remove a request that finished, failed or was aborted."""
        del self._crashes[request_id]
        self._suspects.discard(request_id)
        self._waiting.pop(request_id, None)
        self._inside.discard(request_id)

    def release(self) -> list[str]:
        """The requests to submit now, in order. They count as being in the engine from here on."""
        suspect_inside = bool(self._suspects_inside())
        released = []
        for request_id in self._waiting:
            if request_id in self._suspects:
                if suspect_inside:
                    continue
                suspect_inside = True
            released.append(request_id)
        for request_id in released:
            del self._waiting[request_id]
        self._inside.update(released)
        return released

    def crashed(self) -> Crash:
        """The engine died. The culprit is removed; all other requests in the engine wait for `release` again."""
        suspects = self._suspects_inside()
        for request_id in self._inside:
            self._crashes[request_id] += 1
            if self._crashes[request_id] >= SUSPICIOUS:
                self._suspects.add(request_id)
        if not suspects:  # with a suspect inside, requests that become suspects now are not blamed
            suspects = self._suspects_inside()
        culprit = suspects[0] if len(suspects) == 1 else None
        victims = tuple(name for name in self._crashes if name in self._inside and name != culprit)
        if culprit is not None:
            self.remove(culprit)
        self._inside.clear()
        self._waiting = dict.fromkeys(self._crashes)
        return Crash(victims, culprit)

    def is_inside(self, request_id: str) -> bool:
        """Whether the request was released to the current engine."""
        return request_id in self._inside

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    def _suspects_inside(self) -> list[str]:
        return list(self._suspects & self._inside)
