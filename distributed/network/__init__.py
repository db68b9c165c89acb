"""The sizes of an attention, of a network, and of what goes over it."""
