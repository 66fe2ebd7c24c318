"""The OpenAI-compatible API, and the admin routes."""
