"""Batches in OpenAI's format: lines of requests in, lines of answers out, each exactly once."""
