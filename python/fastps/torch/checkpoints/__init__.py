"""A run's checkpoint in one file, and a model and its optimizer in torch's distributed format."""
