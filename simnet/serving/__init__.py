"""The serving tables and figures of the MoLink papers in virtual time."""
