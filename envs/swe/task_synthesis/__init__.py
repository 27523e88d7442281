"""Tasks from code that is at hand: commits of a repository, releases of a package, bugs put into a checkout."""
