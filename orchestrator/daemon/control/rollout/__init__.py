"""Other workers or options in place of those that serve, and canaries."""
