"""The decode loop: sessions, batches, rounds, and the engine that runs them in a worker process."""
