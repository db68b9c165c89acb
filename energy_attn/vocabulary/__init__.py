"""Losses over a vocabulary, whose memory is linear in the tokens and in the words."""
