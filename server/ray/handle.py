"""The replicas as Ray hands them to the ingress, with Ray's errors as clients should see them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from prometheus_client.core import Metric
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from server.errors import InternalError, UnavailableError
from server.ray.exchange import ForwardedRequest, Taken

NO_REPLICA_S = 30.0
"""A request that no replica takes for this long is refused. They take as many as they hold, so then there is none."""
METRICS_S = 5.0
"""For each replica to tell them."""
_NO_METRICS = "No replica answers. Please try again later."
_logger = logging.getLogger("samewise.ray")


class HandleReplicas:
    """Implements Replicas."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def answer(self, request: ForwardedRequest, session: str) -> AsyncGenerator[Taken | Message]:
        """See Replicas."""
        response = self._handle.options(stream=True, session_id=session).answer.remote(request)
        try:
            try:
                async with asyncio.timeout(NO_REPLICA_S):
                    taken = await anext(response)
            except TimeoutError:
                raise UnavailableError("No replica is ready. Please try again later.") from None
            yield taken
            async for message in response:
                yield message
        except RayTaskError as error:
            _logger.exception("A replica failed on request %s.", request.scope["path"])
            raise InternalError("The replica had an error while processing your request.") from error
        except (RayError, RayServeException) as error:
            message = f"The replica that had this request has ended, and its answer with it ({type(error).__name__})."
            raise UnavailableError(f"{message} Please send the request again.") from error
        finally:
            response.cancel()

    async def metrics(self) -> Sequence[tuple[str, Sequence[Metric]]]:
        """See Replicas."""
        asked = self._handle.broadcast("metrics")
        try:
            # In a thread, since `results_async` has one time limit for all of them, after which it tells none.
            told = await asyncio.to_thread(asked.results, timeout_s=METRICS_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            raise UnavailableError(_NO_METRICS) from None
        pages = [one for one in told if not isinstance(one, BaseException)]
        if errors := [type(one).__name__ for one in told if isinstance(one, BaseException)]:
            _logger.warning("%d of %d replicas told no metrics: %s", len(errors), len(told), ", ".join(errors))
        if not pages:
            raise UnavailableError(_NO_METRICS)
        return pages
