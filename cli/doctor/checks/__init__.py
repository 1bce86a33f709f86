"""Judge facts: each file has one subject, and asks nothing of the machine it runs on."""
