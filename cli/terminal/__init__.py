"""What commands show on a terminal, and what people type there."""
