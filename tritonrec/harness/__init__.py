"""The work behind the commands, a folder for each: proofs, training, measurements, models of clusters."""
