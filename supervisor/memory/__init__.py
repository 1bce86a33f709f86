"""What models need in memory and what the machine has, read from files and from the system."""
