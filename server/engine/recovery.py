"""What happens after the engine died, as pure logic: who is to blame, and who goes back in when."""

from dataclasses import dataclass

SUSPICIOUS = 2
"""A request that was in the engine at this many crashes is a suspect."""


@dataclass(frozen=True, slots=True)
class Crash:
    """The verdict on one death of the engine."""

    victims: tuple[str, ...]
    """Requests that were in the engine and go on in the next one, in the order in which they came."""
    culprit: str | None
    """The request to fail: the only suspect among those that were in the engine."""


class CrashPolicy:
    """Decides which requests may be in the engine, so that one which kills it ends up failed alone.

    After its first crash a request simply goes back in with the others. Requests that saw two crashes are suspects:
    they go back in one at a time, each when the one before has left, with the unsuspected beside them. An engine that
    dies with exactly one suspect in it died of that one.
    """

    def __init__(self) -> None:
        self._crashes: dict[str, int] = {}  # of every live request, in the order in which they came
        self._suspects: set[str] = set()
        self._inside: set[str] = set()
        self._waiting: dict[str, None] = {}  # an ordered set

    def add(self, request_id: str) -> None:
        """A new request; `release` lets it in."""
        self._crashes[request_id] = 0
        self._waiting[request_id] = None

    def remove(self, request_id: str) -> None:
        """The request finished, failed or was aborted."""
        del self._crashes[request_id]
        self._suspects.discard(request_id)
        self._waiting.pop(request_id, None)
        self._inside.discard(request_id)

    def release(self) -> list[str]:
        """The requests to submit now, in order; from here on they count as being in the engine."""
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
        """The engine died. Whoever was in it waits for `release` again, but for the culprit, which is removed."""
        suspects = self._suspects_inside()
        for request_id in self._inside:
            self._crashes[request_id] += 1
            if self._crashes[request_id] >= SUSPICIOUS:
                self._suspects.add(request_id)
        if not suspects:  # whoever became one beside a suspect is none that died with it
            suspects = self._suspects_inside()
        culprit = suspects[0] if len(suspects) == 1 else None
        victims = tuple(name for name in self._crashes if name in self._inside and name != culprit)
        if culprit is not None:
            self.remove(culprit)
        self._inside.clear()
        self._waiting = dict.fromkeys(self._crashes)
        return Crash(victims, culprit)

    def is_inside(self, request_id: str) -> bool:
        """Whether the request was released to the engine that runs now."""
        return request_id in self._inside

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    def _suspects_inside(self) -> list[str]:
        return list(self._suspects & self._inside)
