"""How an attention lies on a mesh: what the user says, what array types say, layouts."""
