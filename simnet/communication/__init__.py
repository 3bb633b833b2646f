"""What devices that share one model send each other: counted, predicted, and simulated message by message."""
