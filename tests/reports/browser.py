"""A real browser, where this machine has one: Chromium driven by playwright (pip install 'espnet2_vllm[browser]')."""

import contextlib
import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def page_of(path):
    """The opened page; fails for anything that it asks for beyond files, and for errors in its console."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    asked, complaints = [], []

    def failed(url, why):
        # A player that knows the length of its sound, and a page that is closed, read no further.
        if why != "net::ERR_ABORTED":
            complaints.append(f"{url}: {why}")

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("requestfailed", lambda request: failed(request.url, request.failure))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.absolute().as_uri())
        yield page
        browser.close()
    assert asked and all(url.startswith(("file:", "data:")) for url in asked), asked
    assert not complaints, complaints
