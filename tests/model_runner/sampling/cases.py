"""Settings of every kind, and a text on which each of them has something to do."""

from model_runner.contract import Breaker, Dry, Mirostat, SamplingParams, Xtc

PROMPT = (3, 5, 7, 3, 5, 9, 3, 5)
OUTPUT = (11, 3, 5, 11, 2, 3, 5)

SETTINGS = {
    "logit_bias": SamplingParams(logit_bias=((0, 3.25), (4, -100.0), (0, 1.5))),
    "allowed_token_ids": SamplingParams(allowed_token_ids=(1, 2, 2, 8, 20)),
    "bad_words": SamplingParams(bad_words=((6,), (3, 5, 1), (2, 3, 5, 4), (9, 5, 0), (5, 5))),
    "min_tokens": SamplingParams(min_tokens=8, stop_token_ids=(2, 12)),
    "min_tokens reached": SamplingParams(min_tokens=7, stop_token_ids=(2, 12)),
    "no_repeat_ngram 1": SamplingParams(no_repeat_ngram_size=1),
    "no_repeat_ngram 2": SamplingParams(no_repeat_ngram_size=2),
    "no_repeat_ngram 3": SamplingParams(no_repeat_ngram_size=3),
    "no_repeat_ngram 40": SamplingParams(no_repeat_ngram_size=40),
    "repetition_penalty": SamplingParams(repetition_penalty=1.3),
    "repetition reward": SamplingParams(repetition_penalty=0.8),
    "frequency_penalty": SamplingParams(frequency_penalty=0.7),
    "presence_penalty": SamplingParams(presence_penalty=-1.1),
    "dry": SamplingParams(dry=Dry(0.8)),
    "dry with breakers": SamplingParams(
        dry=Dry(1.3, 1.1, 1, -1, (Breaker((2, 7)), Breaker((9, 11), (2,)), Breaker((5,), (3,))))
    ),
    "dry in a window": SamplingParams(dry=Dry(2.0, 1.0, 1, 6)),
    "dry without repetition": SamplingParams(dry=Dry(0.8, 1.75, 40)),
    "length penalty": SamplingParams(stop_token_ids=(2, 12), exponential_decay_length_penalty=(4, 1.3)),
    "length penalty down": SamplingParams(stop_token_ids=(2, 12), exponential_decay_length_penalty=(0, 0.7)),
    "length penalty not yet": SamplingParams(stop_token_ids=(2, 12), exponential_decay_length_penalty=(7, 1.3)),
    "length penalty on banned": SamplingParams(
        stop_token_ids=(2, 12), exponential_decay_length_penalty=(4, 1.3), min_tokens=8
    ),
    "temperature": SamplingParams(temperature=0.6),
    "cold": SamplingParams(temperature=1e-3),
    "typical_p": SamplingParams(typical_p=0.83),
    "typical_p low": SamplingParams(typical_p=0.05),
    "top_k": SamplingParams(top_k=7),
    "top_k 1": SamplingParams(top_k=1),
    "top_k above vocabulary": SamplingParams(top_k=10_000),
    "top_p": SamplingParams(top_p=0.87),
    "top_p 0": SamplingParams(top_p=0.0),
    "min_p": SamplingParams(min_p=0.07),
    "min_p 1": SamplingParams(min_p=1.0),
    "top_n_sigma": SamplingParams(top_n_sigma=1.1),
    "top_n_sigma warm": SamplingParams(top_n_sigma=0.7, temperature=1.8),
    "epsilon_cutoff": SamplingParams(epsilon_cutoff=0.02),
    "epsilon_cutoff high": SamplingParams(epsilon_cutoff=0.99),
    "eta_cutoff": SamplingParams(eta_cutoff=0.01),
    "eta_cutoff high": SamplingParams(eta_cutoff=0.9),
    "xtc": SamplingParams(xtc=Xtc(1.0, 0.05)),
    "xtc idle": SamplingParams(xtc=Xtc(1.0, 0.51)),
    "mirostat": SamplingParams(mirostat=Mirostat(1.3, 0.2)),
    "mirostat narrow": SamplingParams(mirostat=Mirostat(0.01, 0.2), temperature=1.3),
    "order": SamplingParams(
        temperature=2.0, top_k=12, top_p=0.8, min_p=0.1, sampler_order=("min_p", "top_p", "top_k", "temperature")
    ),
    "temperature last": SamplingParams(
        temperature=1.9, top_p=0.8, xtc=Xtc(1.0, 0.2), sampler_order=("xtc", "top_p", "temperature")
    ),
    "greedy": SamplingParams(temperature=0, top_k=2, top_p=0.3, min_p=0.5, typical_p=0.2, frequency_penalty=0.3),
    "truncations": SamplingParams(temperature=1.4, typical_p=0.97, top_k=15, top_p=0.9, min_p=0.02),
    "everything": SamplingParams(
        logit_bias=((1, 2.0),),
        allowed_token_ids=tuple(range(25)),
        bad_words=((3, 5, 1), (6,)),
        min_tokens=20,
        stop_token_ids=(2,),
        no_repeat_ngram_size=3,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        dry=Dry(0.3, 1.2, 1, -1, (Breaker((11,)),)),
        exponential_decay_length_penalty=(2, 1.1),
        temperature=1.7,
        top_n_sigma=3.0,
        typical_p=0.95,
        epsilon_cutoff=0.003,
        eta_cutoff=0.002,
        top_k=12,
        top_p=0.93,
        min_p=0.03,
        xtc=Xtc(1.0, 0.3),
    ),
}
