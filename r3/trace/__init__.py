"""Records the path of routes from the rollout to the routers and checks it."""
