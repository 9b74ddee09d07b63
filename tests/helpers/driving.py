"""The demo's page driven in headless Chromium: an image given, a question typed, what appears read."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from selenium.common.exceptions import ElementNotInteractableException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


def until(holds: Callable, seconds: float = 60.0):
    """Waits until `holds()` is true, and returns what it gave. An element that is drawn anew meanwhile is no error."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := holds():
                return found
        except (StaleElementReferenceException, ElementNotInteractableException):
            pass
        assert time.monotonic() < deadline, "what the page should show did not appear"
        time.sleep(0.05)


def insist(does: Callable, holds: Callable):
    """Does something, again every few seconds, until `holds()`: a page that was just loaded may not listen yet."""
    for _ in range(12):
        until(lambda: does() or True)
        try:
            return until(holds, 5)
        except AssertionError:
            continue
    return until(holds, 5)


class Driver:
    """A page of the demo in a browser.

    Args:
        browser: Selenium's, which has loaded the page.
    """

    def __init__(self, browser):
        self.browser = browser
        until(lambda: self.browser.find_elements(By.CSS_SELECTOR, "#question textarea"))

    def upload(self, file: Path) -> None:
        """Gives the file as a person does who chooses it."""
        until(lambda: self._field("#image input[type=file]").send_keys(str(file)) or True)

    def has_image(self) -> bool:
        """Whether an image has been uploaded and is drawn."""
        return self._decoded("#image img") is not None

    def ask(self, question: str) -> None:
        """Types the question and asks it."""
        field = "#question textarea"
        until(lambda: self._field(field).send_keys(Keys.CONTROL, "a") or True)
        until(lambda: self._field(field).send_keys(Keys.BACKSPACE, question) or True)
        self._field("#ask").click()

    def names(self) -> set[str]:
        """What assistive technology calls the fields and buttons."""
        fields = self.browser.find_elements(By.CSS_SELECTOR, "button, textarea, input[type=range]")
        return {field.accessible_name for field in fields}

    def answer(self) -> str:
        """The text in the answer's box."""
        return self._read("#answer textarea", "value")

    def numbers(self) -> str:
        """The line with the norms on entry."""
        return self._read("#numbers", "innerText")

    def figure(self, name: str) -> dict | None:
        """Address, alternative text and size of the image `name` (`heat` or `chart`); None if none is drawn."""
        return self._decoded(f"#{name} img")

    def messages(self) -> str:
        """The text of all messages that are shown."""
        return self._read("[data-testid=toast-body]", "innerText")

    def requests(self) -> list[str]:
        """Addresses asked for since the last call, data URIs left out."""
        events = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        urls = [each["request"]["url"] for each in sent]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def _field(self, selector: str):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def _read(self, selector: str, what: str) -> str:
        # In one step, so that nothing is drawn anew between finding and reading.
        script = "return [...document.querySelectorAll(arguments[0])].map(each => each[arguments[1]]).join('\\n')"
        return self.browser.execute_script(script, selector, what)

    def _decoded(self, selector: str) -> dict | None:
        return self.browser.execute_script(
            "const image = document.querySelector(arguments[0]);"
            "return image && image.complete && image.naturalWidth ?"
            " {src: image.src, alt: image.alt, width: image.naturalWidth, height: image.naturalHeight} : null",
            selector,
        )
