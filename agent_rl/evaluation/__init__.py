"""Pass@1 and what it is made of: running it, reporting it, keeping it in a directory, leaving tasks out."""
