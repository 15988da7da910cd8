"""The console in a real browser: it fills, answers, and fits narrow and dark screens without a fault in its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker import Broker
from tests.fake_mesh import saying
from tests.front import front, ids

CHROMIUM = Path("/usr/bin/chromium")

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_page_shows_the_mesh_and_streams_an_answer(shared_broker: Broker, scheme: str) -> None:
    faults: list[str] = []
    async with front(shared_broker) as router, playwright.async_playwright() as driver:
        await router.mesh.decoder(saying(*ids("the quick brown fox")))
        await router.mesh.prefiller()
        await router.until_ready(2)
        browser = await driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = await browser.new_page(color_scheme=scheme, viewport={"width": 360, "height": 740})
        page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        await page.goto(router.url + "/console")
        see = playwright.expect
        await see(page.locator("#instances h3")).to_have_text(["d0", "p0"])
        await see(page.locator("#pairs li")).to_have_text(["p0 → d0"])
        await page.get_by_label("Message").fill("hi")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await see(page.locator("#answer")).to_have_text("the quick brown fox")
        await see(page.locator("#requests li")).to_have_count(1)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 27)"}[scheme]
        await browser.close()
    assert faults == []
