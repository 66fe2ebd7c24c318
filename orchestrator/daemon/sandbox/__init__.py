"""A process that may die: what compiles or runs text from outside, bounded in stack, memory and time."""
