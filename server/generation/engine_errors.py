"""What the engine's failures mean to a client."""

from model_runner.contract import Failure
from server.engine.client import EngineUnavailableError, QueueFullError, RequestFailedError
from server.errors import ApiError, InternalError, InvalidRequestError, RateLimitError, UnavailableError


def from_failure(failure: Failure) -> ApiError:
    """The error for a choice that failed in the engine."""
    if failure.by_request:
        return InvalidRequestError(f"{failure.message[0].upper()}{failure.message[1:]}.", code="no_token_left")
    return InternalError(f"The engine could not complete this request: {failure.message}")


def from_engine(error: Exception) -> ApiError | None:
    """The error for one of the engine client's; None for anything else."""
    if isinstance(error, QueueFullError):
        message = "The server has as many requests as it can hold. Please try again later."
        return RateLimitError(message, code="rate_limit_exceeded")
    if isinstance(error, EngineUnavailableError):
        return UnavailableError(f"The engine is not ready: {error}" if str(error) else "The engine is not ready.")
    if isinstance(error, RequestFailedError):
        return InternalError(f"The engine could not complete this request: {error}")
    return None
