"""Any agent program, trained through an endpoint of the kind that it speaks already. See docs/harness.md."""
