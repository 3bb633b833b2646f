"""How fast this machine is: measured, remembered, and refined while it serves."""
