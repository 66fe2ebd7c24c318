"""A target's own outputs as data: prompts, the loop that answers them, and the files that the answers are kept in."""
