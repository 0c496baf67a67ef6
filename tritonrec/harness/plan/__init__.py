"""What a run will need, foretold from a trial of its first steps."""
