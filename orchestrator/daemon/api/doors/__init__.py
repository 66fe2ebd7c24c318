"""APIs beside OpenAI's older ones: its Responses and Anthropic's Messages, as translations onto the chat route."""
