"""Depth policies side by side, replayed without noise.

- `recorded`: for each request, the drafter's proposal behind every token, and how much of it is right.
- `fixed`: a fixed depth for all, and one for each request.
- `run`: plays recorded requests under a policy, on costs that are a function.
- `hindsight`: the best fixed depths, by trying all.
"""
