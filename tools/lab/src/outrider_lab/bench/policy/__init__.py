"""`outrider bench policy`: depth policies in the real decode loop, and replayed without noise on what it recorded.

- `asked`: the figures asked for, checked: categories, concurrencies, tokens.
- `requests`: the requests of each category, greedy and seeded.
- `drafters`: a good drafter, a bad one, and one that turns every 50 tokens.
- `arms`: the compared policies: plain, adaptive, fixed depths; and a policy that is timed.
- `runs`: visits: requests under one variant in the decode loop, counted round by round; two of them in turns.
- `session`: all visits in random order, each beside plain decoding, and doubtful ones again.
- `recorder`: drafts behind every token of real outputs, and the costs of rounds: the source of replays.
- `recording`: that, as a file.
- `replays`: every policy on the recording: cells, the whole mix, a load that steps up and down.
- `figures`: the summary, and how each figure of it comes about.
- `table`: the summary for people.
"""
