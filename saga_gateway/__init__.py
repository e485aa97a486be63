"""The OpenAI-compatible gateway: finds the session of a request and the worker that holds its KV."""
