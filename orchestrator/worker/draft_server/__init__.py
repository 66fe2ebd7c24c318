"""A draft worker's end of the links to its targets."""
