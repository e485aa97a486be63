"""`saga demo`: the same agents on stock vLLM and on SAGA, on one machine, compared."""
