"""What several parts of the package use, and nobody else."""
