"""The base of all families of decoders: the abstract decoder, its configuration, cache and outputs."""
