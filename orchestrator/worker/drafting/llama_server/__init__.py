"""The target's end where a llama-server drafts: ids in, ids out, over HTTP."""
