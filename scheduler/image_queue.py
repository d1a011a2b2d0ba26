"""Choices that wait for the features of their images, outside of the queue, so that others are computed meanwhile.

A choice needs features for the rows of images that it computes itself: an image whose rows are all in the prefix cache
needs none. So the scheduler asks when it could admit the choice, and not before. If features are missing, the choice
leaves the queue and comes back, to its place by arrival, when they have been computed. They are held for it until it
has computed the last row of an image, or stops.

Memory for features is bounded, and a choice that finds none holds none while it waits. So those that hold features go
on and release them, and nobody waits in a circle. The next memory is for the client whose images were computed for the
shortest time. Nobody else takes memory before the first that found none, unless its client has its share of it.
"""

from collections.abc import Sequence

from model_runner.contract import Failure
from model_runner.runner_interface import FeatureHolder, Holding, ImageFeatures, ImageStats
from scheduler.block_groups import ReusedKV
from scheduler.request import Request


class ImageQueue:
    """Holds features for choices, and the choices that wait for them, each represented by its group's first member."""

    def __init__(self, features: ImageFeatures | None) -> None:
        """`features` of the runner; None if it takes no images."""
        self._features = features
        self._waiting: dict[str, tuple[Request, Sequence[int]]] = {}
        """By key, in the order in which they came: the first member, and where each member begins to compute."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.key in self._waiting

    @property
    def num_background(self) -> int:
        """Waiting choices in background tiers."""
        return sum(request.is_background for request, _ in self._waiting.values())

    def can_compute(self, head: Request, reused: Sequence[ReusedKV]) -> bool:
        """Whether a group, which reuses this KV, has the features that it needs. They are held for it from now on."""
        starts = [reuse.num_computed for reuse in reused]
        if not any(member.images_from(start) for member, start in zip(head.members, starts, strict=True)):
            return True
        if _holds_all(head, starts):
            return self._state(head) is True
        if any(not _holds_all(*one) for one in self._waiting.values()):
            self._release_all(head)  # others may come first
            return False
        return self._hold(head, starts) is Holding.HELD and self._state(head) is True

    def add(self, head: Request, reused: Sequence[ReusedKV]) -> None:
        """Let a group wait that `can_compute` refused, and that has left the queue."""
        self._waiting[head.key] = head, [reuse.num_computed for reuse in reused]

    def take(self) -> tuple[list[Request], list[tuple[Request, Failure]]]:
        """Take the groups whose features have been computed, and those for which that failed."""
        ready: list[Request] = []
        failed: list[tuple[Request, Failure]] = []
        is_blocked, over_share = False, set[str]()
        for head, starts in sorted(self._waiting.values(), key=self._turn):
            holding = Holding.HELD
            if not _holds_all(head, starts):
                if is_blocked or head.client in over_share:
                    continue
                holding = self._hold(head, starts)
            state = self._state(head) if holding is Holding.HELD else False
            if holding is Holding.NO_MEMORY:
                is_blocked = True
            elif holding is Holding.OVER_SHARE:
                over_share.add(head.client)
            elif isinstance(state, Failure):
                failed.append((head, state))
            elif state:
                ready.append(head)
        for head in (*ready, *(head for head, _ in failed)):
            del self._waiting[head.key]
        return ready, failed

    def _turn(self, waiting: tuple[Request, Sequence[int]]) -> tuple[int, float]:
        """Sort key of groups. Equals have the order in which they came."""
        assert self._features is not None, "somebody waits for features"
        head, _ = waiting
        return head.tier, self._features.served(head.client)

    def wait(self, timeout_s: float) -> None:
        """Wait until more features have been computed, but no longer than this."""
        assert self._features is not None, "somebody waits for features"
        self._features.wait(timeout_s)

    def remove(self, head: Request) -> None:
        """Forget a group that waits here."""
        del self._waiting[head.key]

    def note_computed(self, request: Request) -> None:
        """Let go of the features of a choice that has computed all rows of its images."""
        if not request.images_from(request.num_computed):
            self.release(request)

    def release(self, request: Request) -> None:
        """Let go of the features that are held for a choice, if any."""
        if request.features_from is not None and self._features is not None:
            self._features.release(request.key)
            request.features_from = None

    def _release_all(self, head: Request) -> None:
        for member in head.members:
            self.release(member)

    def stats(self) -> ImageStats | None:
        """Statistics of the features; None if the runner takes no images."""
        return None if self._features is None else self._features.stats()

    def _hold(self, head: Request, starts: Sequence[int]) -> Holding:
        """Hold the features that a group needs, either all or none."""
        assert self._features is not None, "requests with images are checked"
        for member, start in zip(head.members, starts, strict=True):
            if not (images := member.images_from(start)):
                continue
            holder = FeatureHolder(member.key, member.cache_salt, member.client, member.weight, member.tier)
            if (outcome := self._features.hold(holder, images)) is not Holding.HELD:
                self._release_all(head)
                return outcome
            member.features_from = start
        return Holding.HELD

    def _state(self, head: Request) -> bool | Failure:
        """Whether the features that a group holds have been computed, or why they cannot be."""
        assert self._features is not None, "requests with images are checked"
        holders = [member for member in head.members if member.features_from is not None]
        # Asked first: an image may fail meanwhile, and is done then, too.
        is_ready = all(self._features.is_ready(member.key) for member in holders)
        failures = (self._features.failure(member.key) for member in holders)
        return next(filter(None, failures), None) or is_ready


def _holds_all(head: Request, starts: Sequence[int]) -> bool:
    """Whether a group holds all features that it needs, if its members begin to compute here."""
    return all(
        not member.images_from(start) or (member.features_from is not None and member.features_from <= start)
        for member, start in zip(head.members, starts, strict=True)
    )
