"""Generation, speculative decoding and scores of continuations."""
