"""The policy loss: objectives, corrections, penalties. Pure functions of torch tensors."""
