"""Replicas of the target, and the worker processes behind them."""
