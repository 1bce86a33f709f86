"""Text without MLX: tokens to text, stops, channels, tool calls, grammars."""
