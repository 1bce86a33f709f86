"""The HTTP gateway: OpenAI's API in front of a daemon; a client like any other, a process apart."""
