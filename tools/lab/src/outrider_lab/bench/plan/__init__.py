"""How good predictions and plans are, beside what decoding does."""
