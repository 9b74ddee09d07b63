"""A published Space, where this package is not installed, as a person uses it in headless Chromium."""

import subprocess
import sys

import pytest
import space_parts
from browser import chromium, load
from driving import Driver, insist, until
from hub_server import HubServer
from remote_code import BLOCK
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from normalign_llava.hub_cards.space.publish import space_files


pytestmark = pytest.mark.slow


# Bars the package, and keeps a list of what the process connects to or looks up beyond this computer.
SITECUSTOMIZE = (
    BLOCK
    + """
open({log!r}, "a").close()
def watch(event, arguments):
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0"):
        with open({log!r}, "a") as file:
            file.write(f"{{event}} {{host}}\\n")
sys.addaudithook(watch)
"""
)


@pytest.fixture
def published(tmp_path):
    """A Space's process that loads from a hub: its address, the checkpoint, what it asked of others, and the hub."""
    folder = space_parts.checkpoint(tmp_path, context=128)  # which ends answers
    space, site = tmp_path / "space", tmp_path / "site"
    space.mkdir()
    site.mkdir()
    log = tmp_path / "outside.txt"
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(log=str(log)))
    with HubServer({"user/model.v1.5": folder}) as hub:
        repository = hub.repository("user/model.v1.5")
        pinned = repository.head().oid
        repository.advance("main", {}, "All files removed", "user", parent=pinned)
        for path, content in space_files("user/model.v1.5", pinned, "A published model").items():
            (space / path).parent.mkdir(exist_ok=True)
            (space / path).write_bytes(content)
        port = space_parts.free_port()
        environment = {
            **hub.environment(tmp_path / "home"),
            "PYTHONPATH": str(site),
            "GRADIO_SERVER_PORT": str(port),
            "GRADIO_TEMP_DIR": str(tmp_path / "uploads"),
        }
        environment.pop("GRADIO_ANALYTICS_ENABLED", None)
        with open(tmp_path / "log.txt", "w") as output:
            process = subprocess.Popen(
                [sys.executable, "-u", "app.py"], cwd=space, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                until(lambda: "Running on" in (tmp_path / "log.txt").read_text() or process.poll() is not None, 180)
                assert process.poll() is None, (tmp_path / "log.txt").read_text()
                yield f"http://127.0.0.1:{port}/", folder, log, hub
            finally:
                process.terminate()
                process.wait()


def test_a_person_asks_a_published_space_about_an_image(tmp_path, published):
    url, folder, log, hub = published
    red = space_parts.plain(tmp_path / "red.png", "red")
    with chromium(tmp_path / "profile") as browser:
        page = load(browser, url, 1200)
        until(lambda: browser.title == "A published model", 60)
        driver = Driver(browser)
        asked_for = page.requests + _messages(driver)
        asked_for += _one_question(driver, folder, red)
        asked_for += _on_a_phone(browser, url)
    assert [address for address in asked_for if not address.startswith(url)] == []
    assert len(asked_for) > 20
    assert log.read_text() == "" and "Traceback" not in (tmp_path / "log.txt").read_text()
    code = list((tmp_path / "home").rglob("transformers_modules/**/modeling_normalign_llava.py"))
    assert code, "the model's code did not come from its repository"
    assert hub.sent["user/model.v1.5/model-vision_tower-00001-of-00001.safetensors"] > 0


def _messages(driver):
    insist(lambda: driver.ask("what is it?"), lambda: "There is no image yet" in driver.messages())
    close = "document.querySelectorAll('[data-testid=toast-close]').forEach(each => each.click())"
    until(lambda: driver.browser.execute_script(close) or not driver.messages())
    assert driver.answer() == "" and driver.figure("heat") is None
    return driver.requests()


def _one_question(driver, folder, image):
    driver.upload(image)
    until(driver.has_image)
    driver.ask("what color is it?")
    seen = set()
    until(lambda: seen.add(driver.answer()) or driver.figure("chart"))
    answer = driver.answer()
    assert answer and space_parts.direct_answer(folder, image, "what color is it?", 128).startswith(answer)
    assert len(seen) > 3  # it came in pieces
    heat, chart = until(lambda: driver.figure("heat")), driver.figure("chart")
    assert heat["alt"].startswith("Mean over layers") and heat["width"] > 900
    assert "norm of visual and text tokens" in chart["alt"] and chart["width"] > 900
    assert "Norm on entry" in driver.numbers()
    driver.browser.find_element(By.CSS_SELECTOR, "#layer input[type=range]").send_keys(Keys.ARROW_RIGHT * 2)
    layer = until(lambda: (found := driver.figure("heat")) and found["alt"].startswith("Layer 2") and found)
    assert layer["src"] != heat["src"]
    assert driver.names() >= {"Question", "Answer", "Ask", "Stop", "range slider for Layer"}
    return driver.requests()


def _on_a_phone(browser, url):
    page = load(browser, url, 390)
    driver = Driver(browser)
    insist(
        lambda: until(lambda: browser.find_elements(By.CSS_SELECTOR, "button.gallery-item"))[0].click(),
        driver.has_image,
    )
    driver.ask("what color is the circle?")
    until(lambda: driver.figure("chart"))
    assert (page.inner_width, page.scroll_width) == (390, 390)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    return page.requests + driver.requests()
