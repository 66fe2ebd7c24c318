"""Measures what a loaded model, a decode loop and a link cost. Runs in a process of its own, never in a serving one."""
