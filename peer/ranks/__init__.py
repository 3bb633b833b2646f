"""One peer on several devices: the processes that share every layer, and whether they should."""
