"""The energies of a trained sentence encoder: model, measurements and figures."""
