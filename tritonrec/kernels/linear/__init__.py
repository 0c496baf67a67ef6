"""A linear layer whose every row is a function of that row and the weights, and its exact weight gradient."""
