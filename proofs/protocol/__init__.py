"""The protocol: every interleaving of the shipped machine at small sizes, and walks at larger ones."""
