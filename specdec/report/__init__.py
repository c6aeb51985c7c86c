"""Rows to tables, figures and pictures of trees; needs no model."""
