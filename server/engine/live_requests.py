"""Requests in flight: their outputs so far, and the streams that wait for more."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from scheduler.interface import BACKGROUND, ChoiceHistory, ChoiceState, EngineRequest, RequestOutput
from server.engine.places import Places
from server.engine.recovery import Crash, CrashPolicy


class Follower(Protocol):
    """Receives the events of one request. Nothing waits for its methods, and they must not raise."""

    def ended(self, choice: int, history: ChoiceHistory | None) -> None:
        """A choice has ended; called once for each. May be called after the stream was closed.

        `history` is from the last engine that had the choice. It is None if no engine had it, or that engine died.
        """
        ...

    def interrupted(self) -> None:
        """The engine died with the request in it. The request continues in the next engine."""
        ...


class LiveRequest:
    """One request, between the reader that adds outputs and the one consumer that takes them.

    Adding never blocks: the outputs that a slow consumer has not taken are bounded by the request's `max_tokens`.
    """

    def __init__(self, request: EngineRequest, wake: Callable[[], None], follower: Follower) -> None:
        """`wake` is called when there is something new to take."""
        self.follower = follower
        self._request = request
        self._tokens = {choice.index: list(choice.output) for choice in request.choices}  # of unfinished choices
        self._states = {choice.index: choice.sampler_state for choice in request.choices}
        self._outputs: list[RequestOutput] = []
        self._num_places = 0
        """Places that the request holds."""
        self._wake = wake
        self.error: Exception | None = None
        """The error that ended the request early."""

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def num_unfinished(self) -> int:
        """Choices that are still running."""
        return len(self._tokens)

    @property
    def is_background(self) -> bool:
        """Whether it runs only in capacity that other requests leave."""
        return self._request.tier >= BACKGROUND

    def take_places(self, places: Places) -> None:
        """Take a place for each sequence it generates. Background requests take none."""
        if not self.is_background:
            self._num_places = self._request.num_drawn
            places.take(self._request.client, self._request.weight, self._num_places)

    def give_places_back(self, places: Places, *, is_over: bool = False) -> None:
        """Give back the places of choices that ended. A beam search gives back all its places at its end."""
        if is_over or not self._tokens:
            number = self._num_places
        else:
            number = 0 if self._request.beam_search is not None else self._num_places - self.num_unfinished
        if number > 0:
            places.give_back(self._request.client, number)
            self._num_places -= number

    def resumed(self) -> EngineRequest:
        """The request to submit now: only its unfinished choices, with their outputs so far."""
        states = self._states
        choices = tuple(ChoiceState(index, tuple(tokens), states[index]) for index, tokens in self._tokens.items())
        return replace(self._request, choices=choices)

    def apply(self, output: RequestOutput) -> bool:
        """Add an output of a step. Returns False if the choice has ended already, and drops the output."""
        tokens = self._tokens.get(output.choice)
        if tokens is None:
            return False
        tokens.extend(output.tokens)
        self._states[output.choice] = output.sampler_state
        if output.finish_reason is not None:
            del self._tokens[output.choice]
            self.follower.ended(output.choice, output.history)
        self._outputs.append(output)
        self._wake()
        return True

    def abort(self, choice: int) -> bool:
        """End one choice and drop its outputs that were not taken. Returns False if it had finished already.

        The follower is not called here, because the engine still has to report the choice's history.
        """
        was_running = self._tokens.pop(choice, None) is not None
        self._outputs = [output for output in self._outputs if output.choice != choice]
        self._wake()
        return was_running

    def abort_all(self) -> list[int]:
        """End all choices without calling the follower. Returns those that were running."""
        running = list(self._tokens)
        self._tokens.clear()
        return running

    def fail(self, error: Exception) -> None:
        """End all choices. The consumer gets the outputs so far, then the error."""
        for choice in self.abort_all():
            self.follower.ended(choice, None)
        self.error = error
        self._wake()

    def take(self) -> list[RequestOutput]:
        """The outputs since the last call, in order of arrival."""
        outputs, self._outputs = self._outputs, []
        return outputs


class LiveRequests:
    """All live requests, and which of them are in the engine."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._policy = CrashPolicy()
        self._empty = asyncio.Event()
        self._empty.set()
        self.places = Places()
        """Places of the unfinished choices of all requests that are not in the background."""
        self._pending_acks = PendingAcks()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_held(self) -> int:
        """Unfinished choices of requests that are not in the engine."""
        return sum(live.num_unfinished for live in self._held())

    @property
    def num_background_held(self) -> int:
        """Choices of `num_held` that belong to background requests."""
        return sum(live.num_unfinished for live in self._held() if live.is_background)

    @property
    def num_submitted(self) -> int:
        """Requests that are in the engine."""
        return self._policy.num_inside

    def add(self, request: EngineRequest, wake: Callable[[], None], follower: Follower) -> LiveRequest:
        """Add a request without submitting it. Raises ValueError if its id is in use."""
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id!r} is in use")
        live = self._live[request.request_id] = LiveRequest(request, wake, follower)
        self._policy.add(request.request_id)
        live.take_places(self.places)
        self._empty.clear()
        return live

    def release(self) -> list[EngineRequest]:
        """The requests to submit to the engine now."""
        return [self._live[request_id].resumed() for request_id in self._policy.release()]

    def apply(self, outputs: Iterable[RequestOutput]) -> bool:
        """Deliver the outputs of a step, except outputs of ended choices. Returns True if a request finished."""
        finished = False
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None or not live.apply(output):
                self._pending_acks.output_received(output)
                continue
            if output.finish_reason is None:
                continue
            live.give_places_back(self.places)
            if not live.num_unfinished:
                self._forget(output.request_id)
                finished = True
        return finished

    def abort_choice(self, request_id: str, choice: int) -> bool:
        """End one choice; with the last choice, the request. Returns True if the engine must be informed."""
        live = self._live.get(request_id)
        if live is None or not live.abort(choice):
            return False
        live.give_places_back(self.places)
        submitted = self._policy.is_inside(request_id)
        self._note_aborted(live, [choice], submitted)
        if not live.num_unfinished:
            self._forget(request_id)
        return submitted

    def abort(self, live: LiveRequest) -> bool:
        """End this request unless it has ended. Returns True if the engine must be informed."""
        if self._live.get(live.request_id) is not live:
            return False
        submitted = self._policy.is_inside(live.request_id)
        self._forget(live.request_id)  # before its choices are cleared: it counts them
        self._note_aborted(live, live.abort_all(), submitted)
        return submitted

    async def explain(self, request_id: str, send: Callable[[], None]) -> Sequence[ChoiceHistory]:
        """Histories of a request's unfinished choices; empty if the engine does not have it. `send` asks the engine.

        When this returns, followers have received the ends of all choices that were aborted before.
        """
        if not self._policy.is_inside(request_id) and not self._pending_acks.is_expected(request_id):
            return ()
        return await self._pending_acks.ask(request_id, send)

    def explained(self, request_id: str, histories: Sequence[ChoiceHistory]) -> None:
        """Deliver the engine's answer to `explain`."""
        self._pending_acks.explained(request_id, histories)

    def aborted(self, request_id: str, choice: int | None, histories: Iterable[ChoiceHistory]) -> None:
        """The engine has ended an aborted choice, or all of them (None); `histories` are of those that were running."""
        self._pending_acks.abort_acknowledged(request_id, choice, histories)

    def engine_ended(self) -> None:
        """The engine's connection is closed, so pending answers will not come. `crashed` then handles the requests."""
        self._pending_acks.engine_ended()

    def in_background(self) -> list[LiveRequest]:
        """The requests that run only in capacity that others leave."""
        return [live for live in self._live.values() if live.is_background]

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error. An unknown request has ended already and is ignored."""
        if request_id in self._live:
            self._forget(request_id).fail(error)

    def fail_all(self, error: Exception) -> None:
        """End every request with the error."""
        for request_id in list(self._live):
            self.fail(request_id, error)

    def crashed(self, error: Exception) -> Crash:
        """The engine died: no request is in it any more. The culprit, if one was found, ends with the error."""
        self._pending_acks.engine_ended()  # for requests aborted while the engine was shutting down
        crash = self._policy.crashed()
        for victim in crash.victims:
            self._live[victim].follower.interrupted()
        if crash.culprit is not None:
            self._take_out(crash.culprit).fail(error)
        return crash

    async def wait_empty(self) -> None:
        """Returns when no request is live."""
        await self._empty.wait()

    def _held(self) -> Iterator[LiveRequest]:
        return (live for request_id, live in self._live.items() if not self._policy.is_inside(request_id))

    def _note_aborted(self, live: LiveRequest, choices: Iterable[int], submitted: bool) -> None:
        """Call the follower with the engine's report on these choices; at once if the engine does not have them."""
        if submitted:
            self._pending_acks.expect(live.request_id, choices, live.follower)
        else:
            for choice in choices:
                live.follower.ended(choice, None)

    def _forget(self, request_id: str) -> LiveRequest:
        self._policy.remove(request_id)
        return self._take_out(request_id)

    def _take_out(self, request_id: str) -> LiveRequest:
        live = self._live.pop(request_id)
        live.give_places_back(self.places, is_over=True)
        if not self._live:
            self._empty.set()
        return live


class PendingAcks:
    """Aborted choices whose end the engine has not reported, and requests whose history was asked for."""

    def __init__(self) -> None:
        self._aborted: dict[str, dict[int, Follower]] = {}
        """Followers by request and choice."""
        self._explanations: dict[str, asyncio.Future[Sequence[ChoiceHistory]]] = {}

    def expect(self, request_id: str, choices: Iterable[int], follower: Follower) -> None:
        """These choices were aborted, and the engine will report their ends."""
        self._aborted.setdefault(request_id, {}).update(dict.fromkeys(choices, follower))

    def is_expected(self, request_id: str) -> bool:
        """Whether the engine still has to report the end of an aborted choice of this request."""
        return request_id in self._aborted

    def output_received(self, output: RequestOutput) -> None:
        """Use an output of an aborted choice: it may be its last, and carry its history."""
        if output.finish_reason is not None:
            self._report(output.request_id, output.choice, output.history)

    def abort_acknowledged(self, request_id: str, choice: int | None, histories: Iterable[ChoiceHistory]) -> None:
        """An abort of one choice or of all (None) was acknowledged, with the histories of those that were running."""
        for history in histories:
            self._report(request_id, history.choice, history)
        for one in list(self._aborted.get(request_id, ())) if choice is None else [choice]:
            self._report(request_id, one, None)

    def ask(self, request_id: str, send: Callable[[], None]) -> Awaitable[Sequence[ChoiceHistory]]:
        """The engine's answer about a request; empty if the engine dies first. `send` asks it, once."""
        if request_id not in self._explanations:
            self._explanations[request_id] = asyncio.get_running_loop().create_future()
            send()
        return asyncio.shield(self._explanations[request_id])

    def explained(self, request_id: str, histories: Sequence[ChoiceHistory]) -> None:
        """The engine's answer about a request has arrived."""
        if (waiting := self._explanations.pop(request_id, None)) is not None:
            waiting.set_result(histories)

    def engine_ended(self) -> None:
        """Complete all pending reports and questions with nothing."""
        for request_id in list(self._aborted):
            self.abort_acknowledged(request_id, None, ())
        for request_id in list(self._explanations):
            self.explained(request_id, ())

    def _report(self, request_id: str, choice: int, history: ChoiceHistory | None) -> None:
        followers = self._aborted.get(request_id, {})
        if (follower := followers.pop(choice, None)) is None:
            return
        if not followers:
            del self._aborted[request_id]
        follower.ended(choice, history)
