"""The commands: a file for each word that users type, or for each noun."""
