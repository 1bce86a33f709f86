"""The parent process: a pure core that decides, and the asyncio shell around it that acts."""
