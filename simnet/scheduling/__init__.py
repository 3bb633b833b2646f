"""Circuit searches side by side on the scheduling paper's testbeds and on swarms of any size."""
