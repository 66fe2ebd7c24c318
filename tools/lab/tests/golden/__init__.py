"""Decisions of the depth policy and the decode loop, kept: a change that is to change none is seen to change none."""
