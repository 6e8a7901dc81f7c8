"""What the demo shows: the view in the terminal, the report and the plot."""
