"""What one choice gets of a step."""

from model_runner.contract import ChoiceResult, Failure
from scheduler.interface import FinishReason, RequestOutput
from scheduler.request import Request
from scheduler.stopping import Verdict


def output_of(request: Request, choice: ChoiceResult, verdict: Verdict) -> RequestOutput:
    """The tokens that count, with all that is reported of them."""
    num_accepted = min(choice.num_accepted, verdict.num_kept)  # drafts come first among the tokens
    return RequestOutput(
        request_id=request.request_id,
        choice=request.sampling.choice,
        tokens=choice.tokens[: verdict.num_kept],
        logprobs=choice.logprobs[: verdict.num_kept],
        prompt_logprobs=request.take_prompt_logprobs(),
        num_cached_tokens=request.num_cached or 0,
        finish_reason=verdict.reason,
        stop_token_id=verdict.stop_token_id,
        num_accepted=num_accepted,
        num_rejected=choice.num_accepted + choice.num_rejected - num_accepted,
        sampler_state=choice.sampler_state,
        pooled=choice.pooled,
    )


def failure_of(request: Request, error: Failure) -> RequestOutput:
    """The end of a choice whose computation went wrong."""
    return RequestOutput(request.request_id, request.sampling.choice, (), finish_reason=FinishReason.ERROR, error=error)
