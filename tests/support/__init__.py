"""What several directories of tests share: makers of trajectories and runs, fake servers and workers, readers of pages.

Tests import it as ``support``: pytest has ``tests`` on its path.
"""
