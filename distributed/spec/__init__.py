"""How an attention is sharded over a mesh: `parallel=`, sharding plans and layouts."""
