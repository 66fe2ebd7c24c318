"""The target's end of the link to a draft worker."""
