"""Breaks a real daemon on purpose, under load, and says what its clients lost.

`python -m outrider_lab.chaos --seed S --minutes M --json OUT`. docs/chaos.md has the kinds of faults, and how to read
the report.
"""
