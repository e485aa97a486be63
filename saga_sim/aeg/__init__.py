"""How well graphs, conversations and links are inferred from what requests say."""
