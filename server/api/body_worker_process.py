"""A worker process, `python -m server.api.body_worker_process`: checks one body at a time within limits.

`body_worker.py` starts it, and sees from its exit code which limit a body exceeded.
"""

import contextlib
import os
import pickle
import resource
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import server.api.dialects  # noqa: F401 - most errands are functions of these
from model_runner.processes import connect_to_parent
from server.api.body_worker import IMAGE_CPU_S, BodyContext, Errand, Limits, Outcome, too_much_memory
from server.errors import ApiError, InvalidRequestError
from server.generation.constraints.check import grammar_error
from server.generation.constraints.json_schema import schema_fragment
from server.text.chat_template import TemplateSources
from server.text.template_sandbox import TemplateWorkError, within
from server.text.tokenizer import Tokenizer

_LARGE_BYTES = 1 << 30
"""A process with more memory than this is replaced."""
_TEMPLATE = (
    "The model's chat template takes too much work to show these messages: it repeats or copies too much. Send a "
    "shorter conversation, or replace the template with the server's setting chat_template."
)
_MODELS = 4
"""The most models whose tokenizers are kept."""


def main() -> None:
    """Serve until the server closes its end of the pipe or dies."""
    connected = connect_to_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with connected as connection, contextlib.suppress(EOFError, ConnectionError):
        is_last, sender = False, None
        while not is_last:
            errand: Errand = pickle.loads(connection.recv_bytes())
            outcome = _outcome(errand, is_new_sender=errand.sender.name != sender)
            is_last, sender = outcome.is_last, errand.sender.name
            connection.send_bytes(_pickled(outcome))


def _outcome(errand: Errand, *, is_new_sender: bool) -> Outcome:
    """The outcome of an errand: its value, or the exception that the server raises again."""
    try:
        context = _context(errand.pickled_context)
        context = replace(context, files=errand.files, date=errand.sender.date, allow_image=_allow_image)
        if is_new_sender and context.settings.isolate_keys:
            _forget(context)
        with _limited(errand.limits):
            value = within(errand.limits.template_work, errand.work, context, errand.body, *errand.args)
    except MemoryError:
        return Outcome(error=too_much_memory(errand.limits, os.getpid()), is_last=True)
    except TemplateWorkError:
        return Outcome(error=InvalidRequestError(_TEMPLATE, code="request_too_complex"), is_last=_is_large())
    except ApiError as error:
        return Outcome(error=error, is_last=_is_large())
    except Exception as error:  # noqa: BLE001 - raised again in the server
        error.add_note(traceback.format_exc())
        return Outcome(error=error, is_last=_is_large())
    return Outcome(value, is_last=_is_large())


def _forget(context: BodyContext) -> None:
    """Clear all caches of checked bodies: a fast check would reveal to the next sender what another one has sent."""
    for remembered in (grammar_error, schema_fragment):
        remembered.cache_clear()
    context.tokenizer.forget_breakers()


def _pickled(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - a class that cannot be pickled is a bug, reported like any other
        return pickle.dumps(Outcome(error=RuntimeError(f"the result of work on a body cannot be pickled: {error}")))


@contextlib.contextmanager
def _limited(limits: Limits) -> Iterator[None]:
    """Context in which the kernel kills the process at the CPU limit and refuses memory beyond the memory limit."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + limits.cpu_s)
    _set_limit(resource.RLIMIT_DATA, _memory("VmData") + limits.num_bytes)
    try:
        yield
    finally:
        _set_limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
        _set_limit(resource.RLIMIT_DATA, resource.RLIM_INFINITY)


def _allow_image() -> None:
    """Raise the limit of CPU time, within `_limited`, by the time for one image."""
    _set_limit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU)[0] + IMAGE_CPU_S)


def _set_limit(kind: int, soft: int) -> None:
    """Set the soft limit, at most to the hard one."""
    hard = resource.getrlimit(kind)[1]
    is_beyond = hard != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft > hard)
    resource.setrlimit(kind, (hard if is_beyond else soft, hard))


def _is_large() -> bool:
    return _memory("VmRSS") > _LARGE_BYTES


def _memory(name: str) -> int:
    """Bytes of a kind of memory in /proc/self/status; 0 if there is no such file."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


@lru_cache(_MODELS)
def _context(pickled: bytes) -> BodyContext:
    folder, template, model, info, settings = pickle.loads(pickled)
    return BodyContext(_tokenizer(folder, template), model, info, settings)


@lru_cache(_MODELS)
def _tokenizer(folder: Path, templates: TemplateSources | None) -> Tokenizer:
    return Tokenizer.from_folder(folder, templates)


if __name__ == "__main__":
    main()
