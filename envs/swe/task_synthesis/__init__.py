"""Makes tasks from existing code: commits of a repository, releases of a package, bugs injected into a checkout."""
