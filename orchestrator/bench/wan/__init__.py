"""`outrider bench wan`: drafts over a link that takes its time, beside none and beside drafts made one after the other."""
