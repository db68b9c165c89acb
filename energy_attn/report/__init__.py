"""Energy reports of models, landscapes, and their plots."""
