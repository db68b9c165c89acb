"""The energies of a trained sentence encoder: its model, what is measured of it, and the pictures."""
