"""Ways of decoding by their names, from what the server says of its fields. No I/O in here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from server.page.described import Fields
from server.page.parameters.catalog import has_fields


@dataclass(frozen=True, slots=True)
class Preset:
    """A way of decoding."""

    name: str
    says: str
    """What it does, for whoever chooses it."""
    settings: Mapping[str, Any]
    """The fields of a request that ask for it."""


def offered(presets: Iterable[Preset], described: Fields) -> dict[str, Preset]:
    """Those that the server can do, by name."""
    return {preset.name: preset for preset in presets if has_fields(described, preset.settings)}


PRESETS = (
    Preset("Greedy", "Takes the most probable token each time. Nothing is drawn.", {"temperature": 0}),
    Preset("Sampling", "Draws each token as the model's own settings have it; by default from all tokens.", {}),
    Preset("Top-k", "Draws from the 40 most probable tokens.", {"top_k": 40}),
    Preset("Nucleus", "Draws from the most probable tokens that together have a probability of 0.9.", {"top_p": 0.9}),
    Preset("Min-p", "Draws from tokens that have at least a tenth of the probability of the best one.", {"min_p": 0.1}),
    Preset(
        "Typical",
        "Draws from the tokens, of a probability of 0.9 together, whose surprise is nearest to what is expected there.",
        {"typical_p": 0.9},
    ),
    Preset(
        "Top-n-sigma",
        "Draws at a temperature of 1.5, but only tokens whose logit is at most one standard deviation below the best.",
        {"top_n_sigma": 1, "temperature": 1.5},
    ),
    Preset(
        "XTC",
        "At every other token, by chance, leaves out all of a probability of 0.1 or more but the least of them.",
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    ),
    Preset(
        "Mirostat",
        "Draws from tokens below a bound of surprise, corrected after each so that the surprise stays near 3 bits.",
        {"mirostat": 2, "mirostat_tau": 3},
    ),
    Preset(
        "Eta cutoff",
        "Draws from tokens above a least probability, which falls where the model is uncertain.",
        {"eta_cutoff": 0.002},
    ),
    Preset(
        "Contrastive search",
        "Draws nothing: of the 4 most probable tokens it takes one that is probable and unlike the tokens before it.",
        {"penalty_alpha": 0.6, "top_k": 4},
    ),
    Preset(
        "Contrastive decoding",
        "Of the plausible tokens, takes the highest of 1.5 times its logit less half of the smaller model's.",
        {"contrastive": {}, "temperature": 0},
    ),
    Preset(
        "DoLa",
        "Of the plausible tokens, takes the one that gains most between an early layer of the model and its last.",
        {"dola": {"layers": "low"}, "repetition_penalty": 1.2, "temperature": 0},
    ),
    Preset(
        "Guidance",
        "Goes one and a half times as far in the direction in which the prompt changes the answer, and takes the best "
        "token there.",
        {"guidance": {"scale": 1.5}, "temperature": 0},
    ),
    Preset(
        "Beam search",
        "Keeps the 4 most probable beginnings each time, and answers with the one of the best mean log-probability.",
        {"beam_search": {"width": 4}},
    ),
    Preset(
        "Repetition penalty",
        "Greedy, but logits of tokens that were in prompt or answer are divided by 1.2, or multiplied if negative.",
        {"repetition_penalty": 1.2, "temperature": 0},
    ),
    Preset(
        "DRY",
        "Greedy, but tokens that would prolong a repetition cost the more, the longer it already is.",
        {"dry_multiplier": 0.8, "temperature": 0},
    ),
    Preset(
        "Frequency penalty",
        "Greedy, but each time that a token was in the answer takes 0.5 off its logit.",
        {"frequency_penalty": 0.5, "temperature": 0},
    ),
)
FIRST = ("Greedy", "Sampling", "Contrastive search")
"""What is compared at first, as far as it is offered."""

BEAM_PRESETS = (
    Preset(
        "4 beams",
        "Keeps the 4 most probable beginnings each time. Scores are mean log-probabilities of a token.",
        {"beam_search": {"width": 4, "num_return": 4}},
    ),
    Preset(
        "8 beams",
        "Keeps the 8 most probable beginnings each time. Scores are mean log-probabilities of a token.",
        {"beam_search": {"width": 8, "num_return": 8}},
    ),
    Preset(
        "4 beams, by their sums",
        "Scores are sums of log-probabilities, which favours short answers.",
        {"beam_search": {"width": 4, "num_return": 4, "length_penalty": 0}},
    ),
    Preset(
        "Diverse beams",
        "3 groups of 2 beams: a token costs 1 for each beam of an earlier group that has just taken it.",
        {"beam_search": {"width": 6, "num_return": 6, "groups": 3, "diversity_penalty": 1}},
    ),
)
