"""Energy-based models made of the free energy: retrieval from memories, and the block of Energy Transformers."""
