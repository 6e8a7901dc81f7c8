"""Parts of the optimizer: its arguments, its parameter groups, and gradients that leave during backward."""
