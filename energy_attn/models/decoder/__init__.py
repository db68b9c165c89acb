"""What all families of decoders share: the abstract decoder, its configuration, cache and outputs."""
