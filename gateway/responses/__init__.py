"""OpenAI's API of responses: what its requests mean here, and what its answers look like."""
