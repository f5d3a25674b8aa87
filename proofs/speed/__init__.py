"""What KnownDDP costs and what skipping saves, beside torch's own wrappers; see README.md in this folder."""
