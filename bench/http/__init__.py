"""How fast the HTTP gateway is: what is claimed, measured, kept and printed."""
