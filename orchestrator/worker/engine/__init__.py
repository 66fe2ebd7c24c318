"""The decode loop: sequences, batches, rounds, and the engine that runs them in a worker process."""
