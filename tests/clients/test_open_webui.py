"""Open WebUI as its users install it, in a real browser, over a real daemon with the default model.

`make slow` runs it. The torch and the libraries that are here serve it too: its own would be gigabytes.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.clients.environments import bare_environment, list_refused, make_environment
from tests.support.chromium import browsing, needs_chromium
from tests.support.daemon import Daemon

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(3000), needs_chromium]
PACKAGE = "open-webui==0.12.4"
START_S = 600.0
# It offers tools of its own: 7,000 tokens, which two busy cores take minutes to read.
ANSWER_MS = 900_000
ANSWERED = (
    "() => (document.querySelector('.chat-assistant')?.innerText ?? '').trim() !== ''"
    " && document.body.innerText.includes('Response complete')"
)


@contextmanager
def serving_page(program: Path, directory: Path, api: str) -> Iterator[str]:
    """Start Open WebUI without accounts, and return where it is."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings = {
        "DATA_DIR": str(directory / "data"),
        "WEBUI_SECRET_KEY": "0" * 32,
        "WEBUI_AUTH": "False",
        "OFFLINE_MODE": "true",
        "RAG_EMBEDDING_ENGINE": "openai",  # else it fetches a model
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": f"{api}/v1",
        "OPENAI_API_KEY": "none",
    }
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)]
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with (directory / "page.log").open("wb") as log:
        page = subprocess.Popen(command, env=bare_environment(directory) | settings, stdout=log, stderr=log)
        try:
            while not _answers(url):
                assert page.poll() is None
                assert time.monotonic() < deadline
                time.sleep(1)
            yield url
        finally:
            page.terminate()
            page.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.HTTPError:
        return False


def chat(url: str) -> str:
    """Ask on the page as a person does, and return the answer that it shows."""
    with browsing() as browser:
        page = browser.new_page()
        page.goto(url, timeout=120_000)
        page.add_locator_handler(page.get_by_role("button", name="Okay, Let's Go!"), lambda button: button.click())
        page.locator("#chat-input").click(timeout=180_000)
        page.keyboard.type("Name a sea.")
        page.keyboard.press("Enter")
        page.wait_for_function(ANSWERED, timeout=ANSWER_MS)
        return page.locator(".chat-assistant").first.inner_text()


def test_a_person_chats_in_a_browser(seas: Daemon, tmp_path: Path):
    python = make_environment(tmp_path, [PACKAGE], shared=True)
    try:
        with serving_page(python.with_name("open-webui"), tmp_path, seas.url) as url:
            assert chat(url).strip()
    finally:
        shutil.rmtree(tmp_path / "venv")
    assert not list_refused(seas)
