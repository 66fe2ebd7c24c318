"""Another engine as a replica: a server with OpenAI's completions, asked over HTTP."""
