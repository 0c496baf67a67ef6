"""Key routing: the rank that owns a key, keys grouped by owner, and elements grouped by any small number."""
