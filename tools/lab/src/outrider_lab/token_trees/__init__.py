"""What token trees would bring beside the best chain, by replay of a target's outputs, and what they do to bits."""
