"""What a loss means, and what follows from it: who is blamed, when the next worker starts, what hangs."""
