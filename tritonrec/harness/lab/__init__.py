"""`tritonrec lab`: ranks in network namespaces, joined by links of a given rate, and what each mode hides."""
