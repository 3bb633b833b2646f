"""Pairs of instances that hold the same keys and values. Pure decisions, the simulator's as well."""
