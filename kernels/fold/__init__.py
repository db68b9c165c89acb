"""The equations of attention as folds over tiles, each written once, and the canonical tree that orders them."""
