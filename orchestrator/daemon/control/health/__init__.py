"""Parts that fail, requests that kill, workers that hang."""
