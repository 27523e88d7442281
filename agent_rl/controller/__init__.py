"""Where rollout and training meet: the training run, its state, and how it resumes."""
