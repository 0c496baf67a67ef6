"""The rows of docs/papers.md, text by text, and the runs that give their figures."""
