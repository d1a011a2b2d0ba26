"""Accessibility problems of a page, found by axe."""

from collections.abc import Sequence

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import BrowserContext, Page, expect

from tests.page.in_browser.visits import Visits

SIZES = ((1400, 900), (400, 800))
BACK = {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 26)"}


async def bare_context(visits: Visits, address: str, settings: dict[str, object] | None = None) -> BrowserContext:
    """One into which axe can be brought, and in which no colour is on its way to another."""
    return await visits.context(address, settings, bypass_csp=True, reduced_motion="reduce")


async def violations(page: Page, sizes: Sequence[tuple[int, int]] = SIZES, besides: str = "") -> list[str]:
    """Serious violations, each with the first element that has it."""
    found = []
    for width, height in sizes:
        await page.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            await expect(page.locator("body")).to_have_css("background-color", BACK[scheme])
            results = await Axe().run(page, {"exclude": [[besides]]} if besides else None)
            for one in results.response["violations"]:
                if one["impact"] in ("serious", "critical"):
                    node = one["nodes"][0]
                    found.append(f"{width} {scheme} {one['id']}: {node['html']} {node['failureSummary']}")
    return found
