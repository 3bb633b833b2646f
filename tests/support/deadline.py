"""Deadline of whatever a test waits for. It says that something does not come about, never that it came late."""

DEADLINE_S = 200.0
