"""Random configurations against the reference, with the smallest one that fails."""
