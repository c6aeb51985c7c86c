"""The workbook on top of the library: the book of notebooks, the papers' items, the claims.

Whatever knows book.yml, items.yml, claims.yml or a notebook's name stands here. The package finds
it through `machine.find_workbook`.
"""
