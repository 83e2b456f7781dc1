"""File formats: point files, meshes and line-aligned texts, decoded to tensors and strings."""
