"""The commands, one file for each word that users type."""
