"""What one choice gets of a step."""

from model_runner.contract import ChoiceResult, Failure
from scheduler.history import ChoiceHistory
from scheduler.interface import FinishReason, RequestOutput
from scheduler.request import Request
from scheduler.stopping import Verdict


def output_of(request: Request, choice: ChoiceResult, verdict: Verdict, now: float) -> RequestOutput:
    """The tokens that count, with all that is reported of them. The drafts are counted."""
    num_accepted = min(choice.num_accepted, verdict.num_kept)  # drafts come first among the tokens
    num_rejected = choice.num_accepted + choice.num_rejected - num_accepted
    if num_accepted or num_rejected:
        request.progress.note_drafts(choice.method, num_accepted, num_rejected)
    return RequestOutput(
        request_id=request.request_id,
        choice=request.sampling.choice,
        tokens=choice.tokens[: verdict.num_kept],
        logprobs=choice.logprobs[: verdict.num_kept],
        prompt_logprobs=request.take_prompt_logprobs(),
        num_cached_tokens=request.num_cached or 0,
        num_written_tokens=request.num_written,
        finish_reason=verdict.reason,
        stop_token_id=verdict.stop_token_id,
        num_accepted=num_accepted,
        num_rejected=num_rejected,
        draft_method=choice.method if num_accepted else "",
        sampler_state=choice.sampler_state,
        pooled=choice.pooled,
        history=None if verdict.reason is None else request.history(now, has_ended=True),
    )


def failure_of(history: ChoiceHistory, request_id: str, error: Failure) -> RequestOutput:
    """The end of a choice that cannot be computed."""
    return RequestOutput(request_id, history.choice, (), finish_reason=FinishReason.ERROR, error=error, history=history)
