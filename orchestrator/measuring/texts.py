"""The texts that acceptance is measured on where nobody names others: a few kinds of chat requests."""

from __future__ import annotations

WORKLOAD = "chat"
TEXTS = (
    ("explaining", "Explain in three sentences why ships float."),
    ("listing", "List the days of the week and one thing that people often do on each of them."),
    ("rewriting", "Write this again with every name replaced by 'the captain': Anna told Ben that Anna was late."),
    ("writing", "Write the beginning of a short story about a lighthouse keeper and a storm."),
    ("coding", "Write a Python function that returns the largest of three numbers, with a docstring."),
    ("reasoning", "A train leaves at 9:40 and arrives at 11:15. How long does it travel? Show each step."),
)
"""(category, text)."""
