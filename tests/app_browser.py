"""The app in headless Chromium, for its tests, and its pictures in the docs: python -m tests.app_browser

The pictures are docs/app_attention.png, which the page opens with, and docs/app_prior.png.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SECONDS = 60


def why_not() -> str | None:
    """Why there is no browser; None if there is one."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{', '.join(missing)} is missing: apt-get install chromium chromium-driver" if missing else None


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def served(*models: str) -> Iterator[str]:
    """The address of the app, in a process of its own, which leaves no uploaded image when it is ended."""
    port = free_port()
    command = [sys.executable, "-m", "hf_sparseprior", "app", *models, "--port", str(port)]
    with tempfile.NamedTemporaryFile("w+") as log, tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "TMPDIR": scratch}
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            end = time.monotonic() + SECONDS
            while "Running on local URL" not in Path(log.name).read_text():
                if process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(Path(log.name).read_text()[-2000:])
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)
        assert not list(Path(scratch).glob("hf_sparseprior_app_*"))


class Page:
    """The app's page in a browser."""

    def __init__(self, address: str, width: int = 1200, height: int = 1000) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for word in (
            "headless=new",
            "no-sandbox",
            "disable-dev-shm-usage",
            "disable-gpu",
            f"window-size={width},{height}",
        ):
            options.add_argument(f"--{word}")
        # No other server is found.
        options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1")
        options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.get(address)
        self.address = address

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *error: object) -> None:
        self.driver.quit()

    def wait(self, found: Callable[[], Any], what: str) -> Any:
        """What a function finds, as soon as it is something."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(Exception):  # elements come and go while the page is drawn
                if value := found():
                    return value
            time.sleep(0.1)
        raise AssertionError(f"{what} did not appear")

    def all(self, css: str) -> list[Any]:
        """Elements."""
        return self.driver.find_elements("css selector", css)

    def click(self, css: str) -> None:
        """Click on an element as soon as it is there."""

        def clicked() -> bool:
            [element] = [element for element in self.all(css) if element.is_displayed()]
            element.click()
            return True

        self.wait(clicked, css)

    def tab(self, name: str) -> None:
        """Show a tab."""

        def clicked() -> bool:
            tabs = [tab for tab in self.all("button[role=tab]") if tab.is_displayed() and tab.text == name]
            tabs[0].click()
            return tabs[0].get_attribute("aria-selected") == "true"

        self.wait(clicked, f"tab {name}")

    def field(self, label: str) -> Any:
        """The field with this label."""
        [field] = [
            field
            for field in self.all("label input, label textarea")
            if field.is_displayed() and label in field.find_element("xpath", "./ancestor::label").text
        ]
        return field

    def type(self, label: str, text: str) -> None:
        """Write into the field with this label."""

        def written() -> bool:
            field = self.field(label)
            field.send_keys("\ue009a\ue000\ue017", text, "\ue004")  # all of it is replaced, then the next field
            return field.get_attribute("value") == text

        self.wait(written, label)

    def pictures(self, css: str, before: tuple[str, ...] = ()) -> list[str]:
        """Addresses of the pictures that have been drawn in an element; of others than `before`."""

        def drawn() -> list[str]:
            images = self.all(f"{css} img")
            for image in images:  # some are loaded when they come into view
                self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", image)
            images = [image for image in images if image.get_property("naturalWidth")]
            addresses = list(dict.fromkeys(image.get_attribute("src") for image in images))
            return [address for address in addresses if address not in before]

        return self.wait(drawn, f"pictures in {css}")

    def error(self) -> str:
        """The error that the page shows."""
        return self.wait(lambda: " ".join(box.text for box in self.all(".toast-body") if box.text), "an error")

    def pixels(self, address: str) -> np.ndarray:
        """The pixels of a picture of the page."""
        with urllib.request.urlopen(address, timeout=30) as answer:
            return np.asarray(Image.open(io.BytesIO(answer.read())).convert("RGB"))

    def screenshot(self, path: Path, colours: int = 64) -> None:
        """A picture of the page's top, with few colours."""
        time.sleep(2)  # until all is drawn
        self.driver.execute_script("window.scrollTo(0, 0)")
        time.sleep(0.5)
        image = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        image.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)


def take_pictures() -> None:
    """Draw what the docs show: the page as it opens, and a prior."""
    with served() as address, Page(address, 1300, 1130) as page:
        for name in ("first", "second"):
            page.pictures(f"#{name}_picture")
            page.wait(lambda name=name: "measuring" not in page.all(f"#{name}_time")[0].text, "times")
        page.screenshot(DOCS / "app_attention.png", 128)
        page.tab("Prior")
        page.click("#show_prior")
        page.pictures("#prior_pictures")
        page.screenshot(DOCS / "app_prior.png")


if __name__ == "__main__":
    take_pictures()
