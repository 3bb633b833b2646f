"""Real peer processes behind emulated lines, computing as long as another device would."""
