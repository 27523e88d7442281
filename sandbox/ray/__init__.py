"""Sandboxes on the nodes of a Ray cluster: an actor on each node and one backend over all of them."""
