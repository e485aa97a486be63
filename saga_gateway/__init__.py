"""The OpenAI-compatible gateway: sends each request to the worker that holds its session's KV."""
