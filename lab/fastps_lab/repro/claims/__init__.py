"""The claims, one file for each family."""
