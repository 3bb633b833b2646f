"""Which model a peer serves, and where its description comes from."""
