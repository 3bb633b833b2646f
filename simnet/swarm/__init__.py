"""Whole swarms in virtual time: thousands of volunteers that come and go, gateways, and the product's own decisions."""
