"""Training text of the small shipped pairs; imported only by tools."""
