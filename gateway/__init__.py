"""The HTTP gateway: OpenAI's and Anthropic's APIs in front of a daemon, in a process apart."""
