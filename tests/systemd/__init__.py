"""Outrider as a service of systemd."""
