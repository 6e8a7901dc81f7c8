"""Output of the demo: the view in the terminal, the report and the plot."""
