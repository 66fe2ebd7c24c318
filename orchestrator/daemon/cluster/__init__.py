"""The hosts of a cluster: an agent on each, what it finds there, and what is measured between and on them."""
