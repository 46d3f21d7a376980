"""Headless Chromium through chromedriver's HTTP, for tests that look at a page. WebGL is done in software."""
import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

FLAGS = ("--headless=new", "--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic", "--disable-dev-shm-usage")


def missing() -> str:
    """What is not installed; empty: nothing."""
    return ", ".join(name for name in ("chromium", "chromedriver") if not shutil.which(name))


class Browser:
    """size: (width, height) of the page, px. phone: as a mobile device of that size."""

    def __init__(self, folder, size=(1280, 800), phone=False):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._log = open(folder / "chromedriver.log", "w")
        self._driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=self._log, stderr=subprocess.STDOUT)
        self._base = f"http://127.0.0.1:{port}"
        options = {"args": [*FLAGS, f"--window-size={size[0]},{size[1]}", f"--user-data-dir={folder / 'chromium'}"], "binary": shutil.which("chromium")}
        if phone:
            options["mobileEmulation"] = {"deviceMetrics": {"width": size[0], "height": size[1], "pixelRatio": 1.0, "touch": True, "mobile": True}}
        try:
            self._wait_for_driver()
            answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}})
        except BaseException:
            self.close()
            raise
        self._base += f"/session/{answer['sessionId']}"

    def _wait_for_driver(self) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                return self._call("GET", "/status")
            except OSError:
                assert time.monotonic() < end and self._driver.poll() is None, "chromedriver does not answer"
                time.sleep(0.1)

    def _call(self, method: str, path: str, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"].splitlines()[0]) from None

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments):
        """The value that JavaScript returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def screenshot(self) -> bytes:
        """PNG."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def click(self, text: str, seconds: float = 60) -> None:
        """The last button or tab with this text, or the checkbox beside it, when it is there; as a mouse does it."""
        element = self.wait("let e = [...document.querySelectorAll('button, [role=tab], label')].findLast(e => e.textContent.trim() === arguments[0]);"
                            "if (e?.tagName === 'LABEL') { while (e && !e.querySelector('input')) e = e.parentElement; e = e?.querySelector('input') }"
                            "return e", text, seconds=seconds)
        self._call("POST", f"/element/{next(iter(element.values()))}/click", {})

    def wait(self, script: str, *arguments, seconds: float = 60):
        """Until JavaScript returns something true: its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < end, f"waited {seconds} s in vain: {script} {arguments}: {self.run('return document.body.innerText')[:1000]}"
            time.sleep(0.2)
        return value

    def log(self) -> list[str]:
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        if "/session/" in self._base:
            try:
                self._call("DELETE", "")
            except OSError:
                pass
        self._driver.terminate()
        self._driver.wait()
        self._log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
