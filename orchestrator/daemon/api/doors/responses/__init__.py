"""`/v1/responses`, OpenAI's API of items and typed events."""
