"""`/v1/messages`, Anthropic's API of content blocks."""
