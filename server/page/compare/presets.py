"""Decoding presets, and the element that selects one."""

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
    """A named set of decoding settings."""

    name: str
    explanation: str
    """A sentence for the user that explains the preset."""
    settings: Mapping[str, Any]
    """Request fields."""


def offered(presets: Iterable[Preset], descriptions: Fields) -> dict[str, Preset]:
    """The presets that the server supports, by name."""
    return {preset.name: preset for preset in presets if has_fields(descriptions, preset.settings)}


PRESETS = (
    Preset("Greedy", "Always takes the most probable token; nothing is random.", {"temperature": 0}),
    Preset("Sampling", "Samples with the model's default settings; if it has none, from all tokens.", {}),
    Preset("Top-k", "Samples from the 40 most probable tokens.", {"top_k": 40}),
    Preset("Nucleus", "Samples from the most probable tokens that add up to a probability of 0.9.", {"top_p": 0.9}),
    Preset("Min-p", "Samples from tokens with at least a tenth of the best token's probability.", {"min_p": 0.1}),
    Preset(
        "Typical",
        "Samples from the tokens whose surprise is nearest to the mean, up to a total probability of 0.9.",
        {"typical_p": 0.9},
    ),
    Preset(
        "Top-n-sigma",
        "Samples at temperature 1.5 from tokens whose logit is within one standard deviation of the best.",
        {"top_n_sigma": 1, "temperature": 1.5},
    ),
    Preset(
        "XTC",
        "For half of the tokens, at random, excludes all candidates with a probability of 0.1 or more except the least "
        "probable of them.",
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    ),
    Preset("Mirostat", "Samples so that the surprise stays near 3 bits.", {"mirostat": 2, "mirostat_tau": 3}),
    Preset(
        "Eta cutoff",
        "Samples from tokens above a probability threshold, which is lower when the model is uncertain.",
        {"eta_cutoff": 0.002},
    ),
    Preset(
        "Contrastive search",
        "Takes, among the 4 most probable tokens, one that is probable and unlike the earlier tokens; nothing is "
        "random.",
        {"penalty_alpha": 0.6, "top_k": 4},
    ),
    Preset(
        "Contrastive decoding",
        "Among plausible tokens, takes the one with the highest difference: 1.5 times the model's logit minus half of "
        "the smaller model's.",
        {"contrastive": {}, "temperature": 0},
    ),
    Preset(
        "DoLa",
        "Among plausible tokens, takes the one that gains most from an early layer of the model to the last.",
        {"dola": {"layers": "low"}, "repetition_penalty": 1.2, "temperature": 0},
    ),
    Preset(
        "Guidance",
        "Follows the prompt 1.5 times as strongly, and takes the best token.",
        {"guidance": {"scale": 1.5}, "temperature": 0},
    ),
    Preset("Beam search", "Keeps the 4 best partial answers, and returns the best one.", {"beam_search": {"width": 4}}),
    Preset(
        "Repetition penalty",
        "Greedy, but logits of tokens already in prompt or answer are divided by 1.2 (multiplied if negative).",
        {"repetition_penalty": 1.2, "temperature": 0},
    ),
    Preset(
        "DRY",
        "Greedy, but tokens that would extend a repetition are penalised, more so the longer it is.",
        {"dry_multiplier": 0.8, "temperature": 0},
    ),
    Preset(
        "Frequency penalty",
        "Greedy, but each occurrence of a token in the answer lowers its logit by 0.5.",
        {"frequency_penalty": 0.5, "temperature": 0},
    ),
)
FIRST = ("Greedy", "Sampling", "Contrastive search")
"""Presets of the initial columns, if the server supports them."""

BEAM_PRESETS = (
    Preset(
        "4 beams",
        "Keeps the 4 most probable partial answers. Scores are mean log-probabilities per token.",
        {"beam_search": {"width": 4, "num_return": 4}},
    ),
    Preset(
        "8 beams",
        "Keeps the 8 most probable partial answers. Scores are mean log-probabilities per token.",
        {"beam_search": {"width": 8, "num_return": 8}},
    ),
    Preset(
        "4 beams, by sum",
        "Scores are sums of log-probabilities, which favours short answers.",
        {"beam_search": {"width": 4, "num_return": 4, "length_penalty": 0}},
    ),
    Preset(
        "Diverse beams",
        "3 groups of 2 beams. A token is penalised by 1 for each beam of an earlier group that took it in this step.",
        {"beam_search": {"width": 6, "num_return": 6, "groups": 3, "diversity_penalty": 1}},
    ),
)


class Chooser:
    """Selects a preset, shows its description, and opens a form for its settings."""

    def __init__(self, session: Session, presets: Mapping[str, Preset], first: str | None = None) -> None:
        """`first` is the initial preset, by default the first of `presets`."""
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
            self._explanation = ui.label().classes("says")
            self._asked = ui.label().classes("asked")
        with ui.dialog().props('aria-label="Settings of this answer"') as self._dialog, ui.card().classes("dialog"):
            self._place = ui.column().classes("wide")
        self._show()

    @property
    def name(self) -> str:
        return str(self._choice.value)

    @property
    def settings(self) -> dict[str, Any]:
        """The request fields of the current choice."""
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
        self._explanation.set_text("Your own settings." if preset is None else preset.explanation)
        self._asked.set_text(settings_text(self._settings))


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as one line of text."""
    return " · ".join(f"{name} {_short(value)}" for name, value in settings.items()) or "default settings"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(one)}" for name, one in value.items()) or "on"
    return str(value).lower() if isinstance(value, bool) else str(value)
