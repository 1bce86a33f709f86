"""Ollama's API: what its requests mean here, and what its answers look like."""
