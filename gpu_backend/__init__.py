"""What runs inside a vLLM worker: workflow-aware KV retention as a plugin of stock vLLM."""
