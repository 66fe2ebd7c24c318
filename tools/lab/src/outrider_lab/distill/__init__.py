"""Trains a small draft model, or a head that reads its hidden states, for a target, on what the target itself says:
`python -m outrider_lab.distill --help`.

- `prompts`: the questions to the target, composed here or written by the target itself.
- `shards`: the data on disk: token ids and the target's likeliest tokens at each position.
- `orchestrator.generating`: the target answers, many requests at a time; stops and goes on at any point.
"""
