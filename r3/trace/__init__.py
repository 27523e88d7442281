"""The routes' way from the rollout to the routers, written down and checked."""
