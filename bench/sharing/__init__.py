"""What sharing one machine promises, measured: in virtual time and with real processes."""
