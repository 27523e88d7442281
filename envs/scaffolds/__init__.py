"""The interfaces that come along, a module each; :mod:`envs.interface` says what one is."""
