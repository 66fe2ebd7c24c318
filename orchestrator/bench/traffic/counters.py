"""Speculation as a server counts it in /metrics, for servers that do not tell it with each answer (vLLM's default)."""

from __future__ import annotations

from collections import Counter

import httpx
from prometheus_client.parser import text_string_to_metric_families

# vLLM's names, whatever prefix a server gives them (`vllm:`, `outrider_`, `llamacpp:`).
NAMES = {
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
}
TIMEOUT_S = 5.0


async def speculation_counters(client: httpx.AsyncClient, base: str) -> Counter[str]:
    """Return drafts, drafted and accepted tokens since the server's start; empty where it does not say."""
    try:
        response = await client.get(f"{base.removesuffix('/v1')}/metrics", timeout=TIMEOUT_S)
        return parse_counters(response.raise_for_status().text)
    except (httpx.HTTPError, ValueError):
        return Counter()


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
