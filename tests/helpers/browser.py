"""Pages in headless Chromium: what it logs, what it asks for, and how it lays out."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MEASURE_PAGE = """
const page = document.documentElement;
const undecoded = [...document.images].filter(image => !image.complete || !image.naturalWidth);
return {
    inner_width: window.innerWidth,
    scroll_width: page.scrollWidth,
    client_width: page.clientWidth,
    undecoded: undecoded.map(image => image.alt),
};
"""


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
    binary_path = shutil.which("chromium") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    is_installed = binary_path and driver_path
    if not is_installed and not os.environ.get("CI"):
        pytest.skip("there is no Chromium with chromedriver")
    assert is_installed, "install Debian's packages chromium and chromium-driver"
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary_path
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    logged = {"browser": "ALL", "performance": "ALL"}
    options.set_capability("goog:loggingPrefs", logged)
    service = Service(executable_path=driver_path)
    browser = webdriver.Chrome(options=options, service=service)
    try:
        yield browser
    finally:
        browser.quit()


def load(browser, address: str, width: int, dark: bool = False) -> Page:
    """Loads `address` as a device of `width` CSS pixels shows it."""
    _emulate(browser, width, dark)
    browser.get("about:blank")
    # Forgets what was loaded before, Chromium's own start page for one.
    for log_type in ("browser", "performance"):
        browser.get_log(log_type)

    browser.get(address)
    measured = browser.execute_script(MEASURE_PAGE)
    requests, failed = _network_of(browser)
    console = [entry["message"] for entry in browser.get_log("browser")]
    return Page(
        **measured,
        requests=requests,
        failed=failed,
        console=console,
    )


def _emulate(browser, width: int, dark: bool) -> None:
    screen = {
        "width": width,
        "height": 900,
        "deviceScaleFactor": 1,
        "mobile": width < 600,
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme_name = "light"
    if dark:
        scheme_name = "dark"
    colour_scheme = {"name": "prefers-color-scheme", "value": scheme_name}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [colour_scheme]})


def _network_of(browser) -> tuple[list[str], list[str]]:
    """Addresses that were asked for, without data URIs, and those that did not come."""
    addresses = {}  # by the requests' ids
    failures = []
    for log_entry in browser.get_log("performance"):
        event = json.loads(log_entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent":
            request = event["params"]
            addresses[request["requestId"]] = request["request"]["url"]
        elif event["method"] == "Network.loadingFailed":
            failures.append(event["params"])
    requests = [address for address in addresses.values() if not address.startswith("data:")]
    failed = []
    for failure in failures:
        error_text = failure.get("errorText", "?")
        failed.append(addresses.get(failure["requestId"], error_text))
    return requests, failed
