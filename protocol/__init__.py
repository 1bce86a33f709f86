"""All that crosses a process boundary: ids, states, messages, codec, errors, launch contract."""
