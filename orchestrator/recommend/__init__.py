"""`outrider drafts recommend`: which of the drafts that are here to configure, by what they bring on given prompts."""
