"""What runs next: batches, micro-batches, chunks and pieces of prompts. Pure decisions, the simulator's as well."""
