"""Questions that operators have about fleets, each answered by simulations."""
