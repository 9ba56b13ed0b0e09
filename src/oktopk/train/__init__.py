"""The trainer: `oktopk train` and what it needs."""
