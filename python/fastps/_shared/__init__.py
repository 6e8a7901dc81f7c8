"""Private modules that several parts of the package use."""
