"""How the small shipped pairs were made; imported by nobody but tools."""
