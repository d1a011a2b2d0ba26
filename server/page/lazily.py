"""Views that cost nothing before somebody looks at them."""

from collections.abc import Callable

from nicegui import context, ui


def when_first_chosen(tabs: ui.tabs, tab: ui.tab, make: Callable[[], object]) -> None:
    """Make a view when its tab is first chosen. Its elements come to where this is called."""
    place = context.slot
    is_made = False

    def look(chosen: str | None) -> None:
        nonlocal is_made
        if chosen == tab.props["name"] and not is_made:
            is_made = True
            with place:
                make()

    tabs.on_value_change(lambda event: look(event.value))
    look(tabs.value)
