"""The text that the small shipped pairs learned from; imported by nobody but tools."""
