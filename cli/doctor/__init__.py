"""What `mlxsup doctor` looks at: facts are gathered, checks judge them, findings name fixes."""
