"""Programs for maintainers: they build the shipped tasks."""
