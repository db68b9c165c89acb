"""What the families of decoders have beside a Llama: one file for each."""
