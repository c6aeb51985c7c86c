"""Tables, figures and pictures of trees from recorded rows; needs no model."""
