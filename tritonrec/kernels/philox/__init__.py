"""Random numbers that are a function of what they are for, never of when they are drawn."""
