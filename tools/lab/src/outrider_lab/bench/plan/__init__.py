"""How good and how fast plans are: made-up clusters, and the exact answer for those that are small enough."""
