"""`tritonrec profile`: where a training step goes."""
