"""The trainer's state on disk: folders, pieces, and the ranks' writing of them."""
