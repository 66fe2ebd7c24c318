"""The dashboard of a real daemon in a real Chromium: it says what /metrics says, and everybody can use it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon.test_draft_workers import own
from tests.support.chromium import browsing, needs_chromium, opening
from tests.support.daemon import Daemon, configuration, running

pytestmark = needs_chromium

SPECULATIVE = {"ignore_eos": True, "speculative_config": {"num_speculative_tokens": 4}}
ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 60, "extra_body": SPECULATIVE}
KEY = "a-key-of-the-dashboard"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("dashboard")
    with running(configuration(directory, script="base_ms=4", replicas="2", extra=own())) as found:
        deadline_s = time.monotonic() + 240
        while not found.status()["totals"]["drafts"]:
            assert time.monotonic() < deadline_s
            found.client.completions.create(**ASK)
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


def look_at(page: Page, url: str) -> None:
    page.goto(f"{url}/dashboard")
    page.wait_for_selector("#content[data-number]")


def read_metrics(url: str) -> dict[str, float]:
    """Return the sum of each metric over all its labels, and percentiles as "recent_ttft_seconds 50"."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            name = " ".join([sample.name.removeprefix("outrider_"), *filter(None, [sample.labels.get("percentile")])])
            found[name] = found.get(name, 0.0) + sample.value
    return found


def read_figure(page: Page, name: str) -> float:
    return float(page.get_attribute(f'[data-figure="{name}"]', "data-value") or "nan")


def number_of(page: Page) -> int:
    return int(page.get_attribute("#content", "data-number") or 0)


def until(page: Page, happened: Callable[[], Any], seconds: float = 240.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline_s
        page.wait_for_timeout(50)


def test_the_page_shows_what_metrics_says(daemon, browser):
    with opening(browser) as page:
        look_at(page, daemon.url)
        before = read_metrics(daemon.url)
        seen = number_of(page)
        until(page, lambda: number_of(page) >= seen + 2)  # one that was made after `before`
        shown = {one: read_figure(page, one) for one in ("tokens_per_second", "requests", "generated", "losses")}
        percentiles = {
            (name, one): read_figure(page, f"{name}_{one}") for name in ("ttft", "tpot") for one in (50, 95, 99)
        }
        kv, waiting, running_now = (read_figure(page, name) for name in ("kv", "waiting", "running"))
        after = read_metrics(daemon.url)
        assert shown["requests"] == before["request_success_total"] == after["request_success_total"]
        assert shown["generated"] == before["generation_tokens_total"] == 60 * shown["requests"]
        assert shown["losses"] == before.get("worker_losses_total", 0.0)
        assert after["tokens_per_second"] <= shown["tokens_per_second"] <= before["tokens_per_second"], "it only falls"
        assert (waiting, running_now) == (before["num_requests_waiting"], before["num_requests_running"])
        assert 0.0 <= kv <= 1.0
        for (name, one), value in percentiles.items():
            assert value == pytest.approx(before[f"recent_{name}_seconds {one}"] * 1000, rel=1e-12)
            assert re.fullmatch(r"[\d.]+ m?s", page.inner_text(f'[data-figure="{name}_{one}"]'))
        depth = before["spec_decode_num_draft_tokens_total"] / before["spec_decode_num_drafts_total"]
        assert 0.0 < depth <= 12.0
        assert read_figure(page, "depth") == pytest.approx(depth, rel=1e-12)


def test_the_map_has_what_runs_and_is_used_with_keys_alone(daemon, browser):
    with opening(browser) as page:
        look_at(page, daemon.url)
        labels = [one.get_attribute("aria-label") for one in page.query_selector_all("#map [data-part]")]
        for start in ("target target-0", "target target-1", "draft model", "device CPU", "device SIM"):
            assert any((label or "").startswith(start) for label in labels), (start, labels)
        assert len(page.query_selector_all("#map .link.draft")) >= 2
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("!!document.activeElement.closest('#map')"):
                break
        first = page.evaluate("document.activeElement.getAttribute('aria-label')")
        page.keyboard.press("ArrowDown")
        second = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert None not in (first, second)
        assert first != second
        assert page.inner_text("#part h3").split()[0] in ("device", "target", "draft")
        seen = number_of(page)
        until(page, lambda: number_of(page) >= seen + 2)
        assert page.evaluate("document.activeElement.getAttribute('aria-label')"), "its focus is not taken away"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_light_and_dark(daemon, browser, scheme):
    request = daemon.client.completions.create(**ASK)
    with opening(browser, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True) as page:
        page.goto(f"{daemon.url}/dashboard#request/{request.id}")
        page.wait_for_selector("#content[data-number]")
        page.wait_for_selector("#life table")
        page.click("#map-title ~ details summary")
        page.wait_for_selector("#map-tables table")
        found = Axe().run(page, options={"runOnly": RULES})
        assert found.violations_count == 0, found.generate_report()
        assert len(found.response["passes"]) > 20
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.select_option("#theme", "dark" if scheme == "light" else "light")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground


def test_a_lost_target_is_on_the_timeline_and_in_the_life_of_its_request(daemon, browser):
    with opening(browser) as page:
        look_at(page, daemon.url)
        asked = {**ASK, "max_tokens": 1500}
        stream = iter(daemon.client.completions.create(**asked, stream=True))
        answer = next(stream)
        busy = next(one for one in daemon.status()["replicas"] if one["streams"])
        os.kill(busy["ready"]["pid"], signal.SIGKILL)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        page.wait_for_selector("#failovers td:text-is('was lost')", timeout=120_000)
        assert page.query_selector("#timeline circle.loss") is not None
        until(page, lambda: read_figure(page, "losses") >= 1)
        page.fill("#find-id", answer.id)
        page.keyboard.press("Enter")
        page.wait_for_selector("#life table")
        assert "1500 of at most 1500 generated" in page.inner_text("#life")
        assert "goes on at another replica" in page.inner_text("#life")
        assert "Attempt 2" in page.inner_text("#life")
        daemon.wait_for("", phase="ready")


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_the_tab(tmp_path, browser):
    keys = tmp_path / "keys.txt"
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    keys.chmod(0o600)
    config = configuration(tmp_path, extra="drafts: []")
    config.write_text(config.read_text().replace("api: {port: 0,", f"api: {{port: 0, keys_file: '{keys}',"))
    with running(config) as daemon, opening(browser, allow="401|ERR_CONNECTION_REFUSED") as page:
        page.goto(f"{daemon.url}/dashboard")
        page.wait_for_selector("#key-form:visible")
        page.fill("#key", "no key of this daemon")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-problem:has-text('not known here')")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#content[data-number]")
        assert page.inner_text("#link") == "live"
        page.reload()
        page.wait_for_selector("#content[data-number]")
        assert page.evaluate("localStorage.length") == 0
        assert page.context.cookies() == []
        assert daemon.stop() == 0, "a viewer does not hold the daemon up"
        page.wait_for_selector("#link:text-is('reconnecting')")
        assert KEY not in daemon.log.read_text()
