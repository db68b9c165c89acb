"""Energy reports of models, and landscapes."""
