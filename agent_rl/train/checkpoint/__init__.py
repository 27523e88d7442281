"""The trainer's state on disk: directories, pieces, and the ranks' writing of them."""
