"""The demo's page in a browser, as a person uses it: `run_demo` in one process, headless Chromium before it."""

import os
import signal
import socket

import pytest
import space_parts
from browser import chromium, load
from driving import Driver, insist, until
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


pytestmark = pytest.mark.slow


SERVE = """
import sys
from normalign_llava.hub_cards.space.local import run_demo
run_demo(sys.argv[1], port=int(sys.argv[2]))
"""


def test_a_person_asks_about_an_image(prepared, tmp_path):
    folder = space_parts.checkpoint(tmp_path, context=128)  # which ends answers
    red = space_parts.plain(tmp_path / "red.png", "red")
    port = space_parts.free_port()
    url = f"http://127.0.0.1:{port}/"
    process = prepared.start(["-c", SERVE, folder, port])
    try:
        until(lambda: _listens(port) or process.poll() is not None, 180)
        assert process.poll() is None, process.wait()
        with chromium(tmp_path / "profile") as browser:
            page = load(browser, url, 1200)
            driver = Driver(browser)
            asked_for = page.requests + _messages(driver)
            asked_for += _one_question(driver, folder, red)
            asked_for += _on_a_phone(browser, url)
        assert [address for address in asked_for if not address.startswith(url)] == []
        assert len(asked_for) > 20
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        done = process.wait()
    assert "Traceback" not in done.stdout + done.stderr


def _listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


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
