"""Pages in headless Chromium: what it logs, what it asks for, and how it lays out."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


DISABLED = ("gpu", "dev-shm-usage", "quic", "background-networking", "component-update", "sync")
ARGUMENTS = ["--headless=new", "--no-sandbox", "--no-first-run"]
ARGUMENTS += [f"--disable-{name}" for name in DISABLED]


@dataclass(frozen=True)
class Page:
    """What became of a page that was loaded; widths in CSS pixels."""

    inner_width: int
    scroll_width: int  # larger than `client_width` where the page scrolls sideways
    client_width: int
    undecoded: list[str]  # alternative texts of the images that could not be drawn
    requests: list[str]  # addresses, without data URIs
    failed: list[str]  # those that did not come
    console: list[str]


@contextmanager
def chromium(profile: Path) -> Iterator:
    """A headless Chromium with a new `profile`. Without it the test is skipped, but never in CI."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (binary and driver) and not os.environ.get("CI"):
        pytest.skip("there is no Chromium with chromedriver")
    assert binary and driver, "install Debian's packages chromium and chromium-driver"
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    try:
        yield browser
    finally:
        browser.quit()


def load(browser, address: str, width: int, dark: bool = False) -> Page:
    """Loads `address` as a device of `width` CSS pixels shows it."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)  # what was loaded before, Chromium's own start page for one
    browser.get(address)
    measured = browser.execute_script(
        "const page = document.documentElement;"
        "return [window.innerWidth, page.scrollWidth, page.clientWidth, [...document.images]"
        ".filter(image => !image.complete || !image.naturalWidth).map(image => image.alt)]"
    )
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests, failures = (
        [event["params"] for event in events if event["method"] == f"Network.{method}"]
        for method in ("requestWillBeSent", "loadingFailed")
    )
    sent = {request["requestId"]: request["request"]["url"] for request in requests}
    failed = [sent.get(failure["requestId"], failure.get("errorText", "?")) for failure in failures]
    addresses = [url for url in sent.values() if not url.startswith("data:")]
    console = [entry["message"] for entry in browser.get_log("browser")]
    return Page(*measured, addresses, failed, console)
