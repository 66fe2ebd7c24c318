"""OpenAI's routes for files and batches, over the engine of this daemon."""
