"""Drafters: what may stand at the end of a sequence next."""
