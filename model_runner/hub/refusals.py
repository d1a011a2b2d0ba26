"""Messages for models that cannot be downloaded: what is wrong, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from model_runner.hub.access import HUB_URL, ModelNotFoundError, hub_cache
from model_runner.hub.names import FileUrl, HubName
from model_runner.hub.transfer import RefusedError, TransferError, UnreachableError
from model_runner.refusal import UnsupportedModelError

_NOT_HERE = "is not a folder or GGUF file on this machine"


@contextmanager
def refusals_named(name: HubName | FileUrl, revision: str = "") -> Iterator[None]:
    """Turn errors of a download into ModelNotFoundError; UnreachableError passes."""
    try:
        yield
    except UnreachableError:
        raise
    except RefusedError as error:
        raise ModelNotFoundError(_describe(name, revision, error)) from error
    except TransferError as error:
        raise ModelNotFoundError(f"{name} cannot be downloaded: {error}") from error
    except UnsupportedModelError as error:
        raise ModelNotFoundError(f"{name} cannot be served, and was not downloaded: {error}") from error
    except OSError as error:
        where = error.filename or hub_cache()
        raise ModelNotFoundError(f"{name} cannot be stored in {where}: {error.strerror or error}") from error


def _describe(name: HubName | FileUrl, revision: str, error: RefusedError) -> str:
    """Why the hub, or the server of a URL, does not give a file."""
    if isinstance(name, FileUrl):
        return f"{name.address} cannot be downloaded: {error}; check the address"
    if error.code == "GatedRepo":
        return (
            f"{name} is gated on the hub: accept its terms at {HUB_URL}/{name.repo}, then set --hub-token or "
            "the variable HF_TOKEN to a token of that account"
        )
    if error.code == "RevisionNotFound":
        return f"{name} has no revision {revision} on the hub; its page lists branches and tags"
    if "Invalid credentials" in str(error):
        return f"the hub does not accept the token; set --hub-token or HF_TOKEN to a valid one, or unset it ({error})"
    if error.code == "RepoNotFound" or error.status in (401, 404):
        private = "if it is private, set --hub-token or the variable HF_TOKEN"
        return f"{name} {_NOT_HERE}, and the hub has no such model; {private}"
    return f"{name} {_NOT_HERE}, and its download from the hub failed ({error})"
