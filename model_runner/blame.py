"""Which settings leave no token to choose."""

from model_runner.contract import Failure, SamplingParams


def blamed(sampling: SamplingParams) -> str:
    """The fields that may have barred tokens, or made some impossible, by their names in requests."""
    used = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "thinking_token_budget": sampling.thinking,
        "grammar": sampling.grammar,
        "stop_token_ids": sampling.grammar and len(sampling.stop_token_ids) > 1,  # they are no text then
        "bad_words": sampling.bad_words,
        "min_tokens": sampling.min_tokens,
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "dry_multiplier": sampling.dry,
        "exponential_decay_length_penalty": sampling.exponential_decay_length_penalty,
    }
    return ", ".join(name for name, value in used.items() if value)


def no_token_left(sampling: SamplingParams) -> Failure:
    """The end of a choice for which no token can be drawn."""
    return Failure(f"no token can be chosen with these settings: {blamed(sampling)}", by_request=True)
