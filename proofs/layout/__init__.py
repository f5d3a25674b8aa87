"""C: where the elements of a gradient lie in a flat bucket, and how far their mean may be off."""
