"""Decoding presets, and the element that chooses one of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from server.page.capabilities import Fields, has_fields
from server.page.elements import icon_button
from server.page.session import Session
from server.page.settings import ParametersForm

_CUSTOM = "Custom"


@dataclass(frozen=True, slots=True)
class Preset:
    """A way of decoding."""

    name: str
    says: str
    """What it does, in a sentence for the user."""
    settings: Mapping[str, Any]
    """Fields of a request."""


def offered(presets: Iterable[Preset], described: Fields) -> dict[str, Preset]:
    """The presets that the server supports, by name."""
    return {preset.name: preset for preset in presets if has_fields(described, preset.settings)}


PRESETS = (
    Preset("Greedy", "Takes the most probable token each time. Nothing is drawn.", {"temperature": 0}),
    Preset("Sampling", "Draws each token as the model's own settings have it; by default from all tokens.", {}),
    Preset("Top-k", "Draws from the 40 most probable tokens.", {"top_k": 40}),
    Preset("Nucleus", "Draws from the most probable tokens that together have a probability of 0.9.", {"top_p": 0.9}),
    Preset("Min-p", "Draws from tokens that have at least a tenth of the probability of the best one.", {"min_p": 0.1}),
    Preset("Typical", "Draws from tokens, 0.9 together, whose surprise is nearest to the mean.", {"typical_p": 0.9}),
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
    Preset("Mirostat", "Draws so that the surprise stays near 3 bits.", {"mirostat": 2, "mirostat_tau": 3}),
    Preset("Eta cutoff", "Draws from tokens above a bound that falls with uncertainty.", {"eta_cutoff": 0.002}),
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
        "Follows the prompt one and a half times as strongly, and takes the best token.",
        {"guidance": {"scale": 1.5}, "temperature": 0},
    ),
    Preset("Beam search", "Keeps the 4 best beginnings, and answers with the best.", {"beam_search": {"width": 4}}),
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
"""The presets of the first columns, as far as they are offered."""

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


class Chooser:
    """A list of presets, the description of the chosen one, and a form for its settings."""

    def __init__(self, session: Session, presets: Mapping[str, Preset], first: str | None = None) -> None:
        """`first` is the preset to begin with, by default the first one."""
        first = first or next(iter(presets))
        self._session = session
        self._presets = presets
        self._settings = dict(presets[first].settings)
        self._form: ParametersForm | None = None
        with ui.element("div").classes("chooser"):
            with ui.element("div").classes("line"):
                self._choice = ui.select([*presets, _CUSTOM], value=first, on_change=self._choose)
                self._choice.props('outlined dense options-dense aria-label="Decoding"').classes("grow")
                icon_button("tune", "Change its settings", self._open)
            self._says = ui.label().classes("says")
            self._asked = ui.label().classes("asked")
        with ui.dialog().props('aria-label="Settings of this answer"') as self._dialog, ui.card().classes("dialog"):
            self._place = ui.column().classes("wide")
        self._show()

    @property
    def name(self) -> str:
        return str(self._choice.value)

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of a request."""
        return dict(self._settings)

    @property
    def problem(self) -> str:
        """The first invalid setting and its error; empty if all are valid."""
        return self._form.problem if self._form is not None else ""

    def _choose(self) -> None:
        preset = self._presets.get(self.name)
        if preset is None and not self._dialog.value:
            self._open()
        elif preset is not None:
            self._form = None
            self._settings = dict(preset.settings)
        self._show()

    def _open(self) -> None:
        self._place.clear()
        with self._place:
            ui.label("Settings of this answer").classes("title").props("role=heading aria-level=2")
            self._form = ParametersForm(self._session.fields, self._settings, self._change)
            with ui.row().classes("end"):
                ui.button("Done", on_click=self._dialog.close).props("no-caps unelevated")
        self._dialog.open()

    def _change(self) -> None:
        if self._form is not None:
            self._settings = self._form.values
            self._choice.set_value(_CUSTOM)
            self._show()

    def _show(self) -> None:
        preset = self._presets.get(self.name)
        self._says.set_text("Settings of your own." if preset is None else preset.says)
        self._asked.set_text(asked(self._settings))


def asked(settings: Mapping[str, Any]) -> str:
    """Settings in one line."""
    return " · ".join(f"{name} {_short(value)}" for name, value in settings.items()) or "nothing set"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(one)}" for name, one in value.items()) or "on"
    return str(value).lower() if isinstance(value, bool) else str(value)
