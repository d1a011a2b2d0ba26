"""Views that cost nothing before somebody looks at them."""

from collections.abc import Callable
from typing import Any

from nicegui import context, ui
from nicegui.events import ValueChangeEventArguments


def when_first_chosen(tabs: ui.tabs, tab: ui.tab, make: Callable[[], object]) -> None:
    """Make a view when its tab is first chosen. Its elements come to where this is called."""
    place = context.slot
    is_made = False

    def look(event: ValueChangeEventArguments[Any]) -> None:
        nonlocal is_made
        if event.value == tab.props["name"] and not is_made:
            is_made = True
            with place:
                make()

    tabs.on_value_change(look)
