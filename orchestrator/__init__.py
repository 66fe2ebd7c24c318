"""The Outrider daemon: configuration, decoding, drafting, cluster, control, API and commands."""
