"""What a server says in /metrics: speculation, for servers that do not tell it with each answer (vLLM's default), and
what its devices cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

# vLLM's names, whatever prefix a server gives them (`vllm:`, `outrider_`, `llamacpp:`).
NAMES = {
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
}
PRICE = "outrider_price_per_hour"
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """What a server says. `speculation`: drafts, drafted and accepted tokens since its start, empty where it does not
    say; `price_per_hour`: of its devices in use, 0 where it does not say, in units of `currency`."""

    speculation: Counter[str]
    price_per_hour: float = 0.0
    currency: str = ""


async def fetch_server_figures(
    client: httpx.AsyncClient, base: str, headers: Mapping[str, str] | None = None
) -> ServerFigures:
    """Ask a server. `headers`: its key, where it asks for one."""
    try:
        response = await client.get(f"{base.removesuffix('/v1')}/metrics", headers=headers, timeout=TIMEOUT_S)
        text = response.raise_for_status().text
        return ServerFigures(parse_counters(text), *parse_price(text))
    except (httpx.HTTPError, ValueError):
        return ServerFigures(Counter())


def parse_price(text: str) -> tuple[float, str]:
    """Return the price an hour and its currency, 0 where there is none. Raises ValueError as `parse_counters` does."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == PRICE:
                return float(sample.value), sample.labels.get("currency", "")
    return 0.0, ""


def parse_counters(text: str) -> Counter[str]:
    """Add up the counters over all their labels. Raises ValueError for what is no Prometheus text."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            bare = sample.name.removesuffix("_total")
            for name, short in NAMES.items():
                if bare.endswith(name):
                    found[short] += int(sample.value)
    return found
