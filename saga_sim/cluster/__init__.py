"""A cluster of vLLM's own schedulers under agents, on a virtual clock."""
