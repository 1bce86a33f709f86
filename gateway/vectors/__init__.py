"""Embeddings and rankings, in the forms of OpenAI, Jina, Cohere and Ollama."""
