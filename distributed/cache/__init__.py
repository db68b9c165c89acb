"""A key-value cache sharded over a mesh."""
