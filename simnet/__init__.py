"""Simulated worlds that run the product's own decisions."""
