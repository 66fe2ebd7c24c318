"""`outrider bench wan`: drafts over a slow link, beside none and beside drafts made before each verification."""
