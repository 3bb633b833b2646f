"""Cost-profit margins of the MoLink system paper, and of anyone's swarm."""
