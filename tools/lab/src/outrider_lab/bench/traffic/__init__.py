"""Load for any OpenAI-compatible endpoint: arrivals, one streamed request, the figures made of many."""
