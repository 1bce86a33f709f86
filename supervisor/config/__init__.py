"""The configuration file: its tables, how it is read, and what is wrong with it."""
