"""Emulated lines: one uplink each, of a rate and a delay, that move real bytes between real sockets."""
