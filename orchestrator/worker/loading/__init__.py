"""Puts models on devices: options, number formats, numerical class, memory, drafters, and the engines over them."""
