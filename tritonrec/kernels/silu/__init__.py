"""SiLU whose value at an element depends on that element alone."""
