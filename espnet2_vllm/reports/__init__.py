"""What became of a decoded set: a table, the same as JSON, and a page for the eye."""
